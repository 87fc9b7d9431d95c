"""CUDA C++ that both generations share: compiled for Blackwell without a GPU, in registers, and registered there."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="brings the tools that read machine code")
pytest.importorskip("cuda.core")
pytest.importorskip("cuda.bindings.nvrtc")

from kernel_launches import backend_of

from deepinfer.backends.cuda_sm90 import attention_forms, index_q, kv, selection
from deepinfer.backends.nvidia import nvrtc
from deepinfer.backends.nvidia.ahead import resource_usage
from deepinfer.ops.errors import DeviceError
from deepinfer.ops.proof import proof_level, source_files

REGISTERS = 65536
THREADS = 512


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("architecture", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize(("half", "cluster"), [(False, 1), (True, 2), (True, 8)])
def test_top_k_compiles_for_blackwell(half: bool, cluster: int, architecture: str) -> None:
    registers, local_bytes = resource_usage(selection.program(half, cluster).compile(architecture))
    assert local_bytes == 0
    assert registers * THREADS <= REGISTERS


@pytest.mark.parametrize("architecture", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize(("dim", "kind", "records"), [(512, "fp8", 32), (512, "fp4", 64), (128, "index", 64)])
def test_stores_of_records_compile_for_blackwell(dim: int, kind: str, records: int, architecture: str) -> None:
    assert resource_usage(kv.program(dim, kind, 64, records).compile(architecture))[1] == 0


@pytest.mark.parametrize("architecture", ["sm_100a", "sm_103a"])
def test_index_queries_compile_for_blackwell(architecture: str) -> None:
    assert resource_usage(index_q.program(64).compile(architecture))[1] == 0


@pytest.mark.parametrize("entry", ["mark_slots", "decode_records"])
def test_helpers_of_attention_would_too(entry: str) -> None:
    """What has no warpgroup MMA is portable; that no backend uses these yet is another matter."""
    program = attention_forms.Pages(32, 64, kv_fp4=True).helper(entry)
    registers, local_bytes = resource_usage(program.compile("sm_100a"))
    assert registers > 0 and local_bytes == 0


def test_warpgroup_products_do_not() -> None:
    program = attention_forms.Pages(32, 64, kv_fp4=True).program(attention_forms.Form.DIRECT)
    with pytest.raises(DeviceError, match="wgmma"):
        program.compile("sm_100a")


def test_portable_kernels_stand_under_blackwells_name() -> None:
    from deepinfer.backends.cuda_sm100.portable import PORTABLE

    backend = backend_of(100)
    for name, _ in PORTABLE:
        (found,) = [i for i in backend.implementations if i.name == f"cuda_sm100.{name}"]
        assert not found.interpreted
        assert proof_level(found) == "compiled"  # no such device was at hand
        files = {file.name for file in source_files(found)}
        assert {"portable.py", "nvrtc.py"} < files
        assert any(file.endswith(".cu") for file in files)


def test_a_device_names_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc.torch.cuda, "get_device_capability", lambda device: [(9, 0), (10, 0), (10, 3)][device])
    nvrtc.architecture_of.cache_clear()
    assert [nvrtc.architecture_of(device) for device in range(3)] == ["sm_90a", "sm_100a", "sm_103a"]
    nvrtc.architecture_of.cache_clear()
