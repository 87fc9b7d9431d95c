"""CUDA C++ compiles for Hopper without a GPU, keeps its values in registers, and has the instructions it is made of."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="brings the tools that read machine code")
pytest.importorskip("cuda.core")
pytest.importorskip("cuda.bindings.nvrtc")

from deepinfer.backends.cuda_sm90 import products, sparse_attn
from deepinfer.backends.nvidia.ahead import CUOBJDUMP, resource_usage
from deepinfer.backends.nvidia.nvrtc import CudaProgram
from deepinfer.ops.errors import DeviceError

SHARED_OF_MULTIPROCESSOR = 228 << 10
SHARED_OF_BLOCK = 227 << 10
REGISTERS = 65536
ATTENTION_STACK = 8
"""Bytes outside registers that the attention kernel has: an address taken, no value of its loops."""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))


def instructions(code: bytes, folder: Path) -> str:
    file = folder / "kernel.cubin"
    file.write_bytes(code)
    return subprocess.run([CUOBJDUMP, "--dump-sass", file], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("tokens", [8, 64, 144, 192])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_stay_in_registers(bits: int, tokens: int, tmp_path: Path) -> None:
    form = products.Form(bits, tokens, groups=2, wide=False, experts=384)
    code = form.program().compile("sm_90a")
    registers, local_bytes = resource_usage(code)
    assert local_bytes == 0
    threads = 128 * form.groups + 32
    assert registers * threads * form.resident <= REGISTERS
    text = instructions(code, tmp_path)
    assert f"HGMMA.64x{tokens}x16.F32.BF16" in text
    assert "UBLKCP" in text and "UTMALDG.2D" in text


@pytest.mark.parametrize("wide", [False, True])
def test_halves_stay_in_registers(wide: bool) -> None:
    _, local_bytes = resource_usage(products.Form(8, 16, groups=1, wide=wide).program().compile("sm_90a"))
    assert local_bytes == 0


@pytest.mark.parametrize("kv_fp4", [False, True])
def test_sparse_attention(kv_fp4: bool, tmp_path: Path) -> None:
    code = sparse_attn.program(32, 64, kv_fp4).compile("sm_90a")
    registers, local_bytes = resource_usage(code)
    assert registers == 128  # at entry; warpgroups divide them anew
    assert local_bytes <= ATTENTION_STACK
    assert "HGMMA.64x128x16.F32.BF16" in instructions(code, tmp_path)


@pytest.mark.parametrize("tokens", [8, 16, 24, 32, 48, 64, 80, 96, 128, 144, 192])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("groups", [1, 2])
def test_rings_fit_the_multiprocessor(bits: int, tokens: int, groups: int) -> None:
    form = products.Form(bits, tokens, groups, wide=False, experts=products.MOST_EXPERTS)
    assert form.stages >= 2
    assert form.shared_bytes <= SHARED_OF_BLOCK
    assert (form.shared_bytes + 1024) * form.resident <= SHARED_OF_MULTIPROCESSOR


@pytest.mark.parametrize(("rows", "experts", "tokens"), [(1, 1, 8), (64, 1, 64), (200, 1, 128), (8192, 1, 192)])
def test_tiles_of_one_matrix(rows: int, experts: int, tokens: int) -> None:
    assert products.tile_tokens(rows, experts) == tokens


def test_tiles_of_experts_leave_room_for_chance() -> None:
    assert [products.tile_tokens(6 * tokens, 384) for tokens in (1, 128, 1024, 4096, 16384)] == [8, 8, 24, 80, 144]


def test_what_does_not_compile_says_why() -> None:
    program = products.Form(8, 8, groups=2, wide=False).program()
    broken = CudaProgram(program.files, program.entry, dict(program.macros, TOKENS="nothing"), program.generated)
    with pytest.raises(DeviceError, match=r"products\.cu does not compile for sm_90a"):
        broken.compile("sm_90a")
