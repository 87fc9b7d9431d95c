"""Launching: what chooses a compiled form, what a recorder sees, and what is not launched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton

from deepinfer.backends.nvidia.ahead import distinct
from deepinfer.backends.nvidia.launch import Kernel, recording
from deepinfer.backends.nvidia.norm import rms_norm
from deepinfer.backends.nvidia.tensors import next_pow2, rows_of, vector_width


class _Made:
    """Stands for a compiled kernel: keeps what it is launched with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def run(self, *everything: Any) -> None:
        self.launches.append(everything)


@pytest.fixture(autouse=True)
def _stream(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: f"stream of {device}"))
    monkeypatch.setattr(triton.runtime, "driver", driver)


class _Jit:
    """Stands for Triton: counts compilations."""

    def __init__(self) -> None:
        self.made: list[_Made] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_launch(*args: Any, **options: Any) -> _Made:
            self.made.append(_Made())
            return self.made[-1]

        return compile_and_launch


def test_a_handle_serves_every_launch_of_its_form() -> None:
    jit = _Jit()
    kernel, x = Kernel(jit), torch.zeros(64)
    for number in (1, 2, 2**40):
        kernel((3,), x, number, WIDTH=8)
    assert len(jit.made) == 1
    first, second = jit.made[0].launches
    assert first[:9] == (3, 1, 1, "stream of None", "function", "metadata", None, None, None)
    assert first[9] is x and first[10:] == (2, 8)
    assert second[10:] == (2**40, 8)


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(64, dtype=torch.bfloat16)},
        {"x": torch.zeros(65)[1:]},  # not aligned to 16 bytes
        {"x": None},
        {"WIDTH": 16},
        {"num_warps": 8},
    ],
)
def test_another_form_is_compiled_anew(other: dict[str, Any]) -> None:
    jit, first = _Jit(), {"x": torch.zeros(64), "WIDTH": 8}
    kernel = Kernel(jit)
    for arguments in (first, first | other):
        options = dict(arguments)
        kernel((1,), options.pop("x"), torch.zeros(1), **options)
    assert len(jit.made) == 2


def test_a_grid_without_programs_launches_nothing() -> None:
    jit = _Jit()
    Kernel(jit)((0, 4), torch.zeros(1))
    assert not jit.made


def test_a_recorder_sees_launches_instead_of_the_device() -> None:
    x = torch.randn(3, 40).to(torch.bfloat16)
    with recording() as launches:
        rms_norm(x, None, 1e-6)
        rms_norm(x[:2], None, 1e-6)
        rms_norm(torch.randn(2, 48), None, 1e-6)
    assert [launch.grid for launch in launches] == [(3,), (2,), (2,)]
    assert launches[0].constants["WIDTH"] == 40
    assert len(distinct(launches)) == 2


def test_rows_are_views_where_strides_allow() -> None:
    wide = torch.arange(60.0).reshape(3, 20)
    assert rows_of(wide[:, 4:9]).data_ptr() == wide[:, 4:9].data_ptr()
    heads = torch.arange(24.0).reshape(2, 3, 4)
    assert rows_of(heads).shape == (6, 4)
    assert torch.equal(rows_of(heads.transpose(1, 2)), heads.transpose(1, 2).reshape(8, 3))


def test_widths() -> None:
    assert [next_pow2(n) for n in (0, 1, 2, 3, 5120)] == [1, 1, 2, 4, 8192]
    assert vector_width(5120, 32) == 16
    assert vector_width(5120, 33) == 1
