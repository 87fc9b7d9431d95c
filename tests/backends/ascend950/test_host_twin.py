"""The whole way of a launch: an op of this package through launcher, driver, streams and graphs into the twin.

The driver is the fake one: it hands over a kernel's name and packed arguments when its turn has come, and the twin runs
the kernel on the tensors that those addresses belong to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from deepinfer.backends.ascend950 import BACKEND, norm, twin_build
from deepinfer.backends.ascend950.host.launcher import arguments, pack, submit
from deepinfer.backends.ascend950.launch import Kernel, TwinFault
from deepinfer.entrypoints.conformance_cli import app
from deepinfer.ops import norm as norm_ops
from deepinfer.ops import registry
from deepinfer.ops.backend import Availability

_TWIN_CACHE = twin_build.cache_folder()  # as the user has it: the tests' own cache folders are new every time
_FORMS = {"p": ctypes.c_void_p, "i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float}


def _unpack(kernel: Kernel, packed: bytes) -> list[Any]:
    """Values of packed arguments, read as C would read a structure with these members."""
    members = [(f"_{place}", _FORMS[parameter.letter]) for place, parameter in enumerate(kernel.parameters)]
    structure = type("Arguments", (ctypes.Structure,), {"_fields_": members})
    assert len(packed) >= ctypes.sizeof(structure)
    read = structure.from_buffer_copy(packed)
    return [getattr(read, name) for name, _ in members]


@pytest.fixture
def errors(launcher, fake_acl, monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Kernels go through the driver, as with tensors of a device; errors of the twin are collected here."""
    monkeypatch.setattr(twin_build, "cache_folder", lambda: _TWIN_CACHE)
    run_in_twin = Kernel.__call__
    launched: dict[tuple[str, bytes], tuple[Kernel, int, Sequence[Any]]] = {}
    found: list[BaseException] = []

    def call(kernel: Kernel, blocks: int, *args: Any) -> None:
        if blocks:
            packed = pack(arguments(kernel, args))
            launched[kernel.entry, packed] = kernel, blocks, args
            submit(launcher, kernel, blocks, args)

    def on_kernel(name: str, blocks: int, packed: bytes) -> None:
        try:
            kernel, asked, args = launched[name, packed]
            sent = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
            read = _unpack(kernel, packed)
            assert blocks == asked and [value or 0 for value in read] == pytest.approx([value or 0 for value in sent])
            run_in_twin(kernel, blocks, *args)
        except BaseException as error:
            found.append(error)

    monkeypatch.setattr(Kernel, "__call__", call)
    fake_acl.on_kernel(on_kernel)
    return found


def _want(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return norm_ops.rms_norm.reference(x.double(), weight, 1e-6)


def test_an_op_has_run_when_its_stream_has_run(runtime, errors: list[BaseException]) -> None:
    x = torch.randn(70, 96, generator=torch.Generator().manual_seed(1))
    weight = torch.rand(96, generator=torch.Generator().manual_seed(2))
    out = runtime.zeros((70, 96), torch.float32)
    norm.rms_norm(runtime.to_device(x), runtime.to_device(weight), 1e-6, out=out)
    assert torch.allclose(runtime.to_host(out).double(), _want(x, weight), rtol=1e-5, atol=1e-6)
    assert not errors


def test_a_missing_tensor_arrives_as_a_null_pointer(runtime, errors: list[BaseException]) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    out = runtime.zeros((3, 64), torch.float32)
    norm.rms_norm(runtime.to_device(x), None, 1e-6, out=out)
    assert torch.allclose(runtime.to_host(out).double(), _want(x, None), rtol=1e-5, atol=1e-6)
    assert not errors


def test_a_captured_op_reads_what_its_inputs_hold_at_the_replay(runtime, errors: list[BaseException]) -> None:
    source, out = (runtime.zeros((4, 64), torch.float32) for _ in range(2))
    replay = runtime.capture(lambda: norm.rms_norm(source, None, 1e-6, out=out))
    for seed in (4, 5):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
        runtime.write(source, x)
        replay()
        assert torch.allclose(runtime.to_host(out).double(), _want(x, None), rtol=1e-5, atol=1e-6)
    assert not errors


def test_a_fault_of_the_twin_is_seen(runtime, errors: list[BaseException]) -> None:
    x = runtime.zeros((2, 64), torch.float32)
    norm._ROWS["f32"](1, x, None, x[:1], None, None, 2, 64, 64, 0, 0, 1e-6)  # two rows into room for one
    runtime.synchronize()
    assert [type(error) for error in errors] == [TwinFault]


def test_verify_runs_the_cases_on_the_device_and_remembers(
    runtime, errors: list[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    BACKEND.load()
    own = [i for i in BACKEND.implementations if i.interpreted and i.op.name == "rms_norm"]
    here = replace(BACKEND, probe=lambda: Availability(True), runtime=lambda: runtime, implementations=own)
    monkeypatch.setattr(registry, "find_backend", lambda name: here)
    said = CliRunner().invoke(app, ["verify", "--backend", "ascend950", "--op", "rms_norm"])
    told = " ".join(said.output.split())
    assert said.exit_code == 0, told
    assert f"rms_norm {own[0].name} passes" in told and "verdicts:" in told
    assert not errors


def test_packing_agrees_with_what_a_c_compiler_would_do() -> None:
    for kernel in norm._ROWS.values():
        values = [_FORMS[p.letter](place + 1) for place, p in enumerate(kernel.parameters)]
        assert _unpack(kernel, pack(values)) == [place + 1 for place in range(len(values))]
