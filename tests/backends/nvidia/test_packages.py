"""The two packages: what they say where they cannot run, and what they register."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from deepinfer.backends.nvidia import probe as probe_module
from deepinfer.entrypoints.cli import app
from deepinfer.ops import proof
from deepinfer.ops.backend import Backend
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.errors import BackendUnavailableError
from deepinfer.ops.proof import source_files
from deepinfer.ops.registry import discover_backends, find_backend, find_emulated

NAMES = ("cuda_sm90", "cuda_sm100")


def _device(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr(probe_module, "find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("name", "capability", "there"),
    [
        ("cuda_sm90", (9, 0), True),
        ("cuda_sm90", (10, 0), False),
        ("cuda_sm100", (10, 0), True),
        ("cuda_sm100", (10, 3), True),
        ("cuda_sm100", (12, 0), False),
        ("cuda_sm100", (9, 0), False),
    ],
)
def test_a_generation_serves_its_capabilities(
    name: str, capability: tuple[int, int], there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _device(monkeypatch, capability)
    answer = discover_backends()[name].probe()
    assert answer.available is there
    if not there:
        assert f"A GPU has compute capability {capability[0]}.{capability[1]}" in answer.reason


def test_a_missing_device_torch_or_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = discover_backends()["cuda_sm90"].probe
    _device(monkeypatch, None)
    assert "torch sees no CUDA device" in probe().reason
    monkeypatch.setattr(probe_module, "find_spec", lambda name: None)
    assert "triton, cuda-core, cuda-bindings are not installed" in probe().reason
    monkeypatch.setattr(probe_module, "find_spec", lambda name: None if name == "cuda.core" else object())
    assert probe().reason == "cuda-core is not installed; pip install cuda-core"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in probe().reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
@pytest.mark.parametrize("name", NAMES)
def test_without_a_device_the_reason_is_said(name: str) -> None:
    with pytest.raises(BackendUnavailableError, match=f"backend '{name}' is installed but cannot run here"):
        find_backend(name)


def test_the_probe_imports_no_kernels() -> None:
    program = (
        "import sys; from deepinfer.ops.registry import discover_backends\n"
        "[b.probe() for b in discover_backends().values()]\n"
        "assert 'triton' not in sys.modules and 'deepinfer.backends.nvidia.norm' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_every_op_has_an_implementation_with_sources_of_its_own(name: str) -> None:
    pytest.importorskip("triton")
    backend = discover_backends()[name]
    backend.load()
    assert {i.op.name for i in backend.implementations} == set(defined_ops())
    for implementation in backend.implementations:
        assert implementation.name.startswith(f"{name}.")
        files = source_files(implementation)
        assert files[0].parent.name == name  # its proofs are kept there
        missing = [pattern for pattern in implementation.sources if not list(files[0].parent.glob(pattern))]
        assert not missing, f"{implementation.name}: no file is {missing}"


def test_a_backend_without_an_interpreter_has_no_emulated_form() -> None:
    with pytest.raises(BackendUnavailableError, match="backend 'cpu' has no emulated form"):
        find_emulated("cpu")
    with pytest.raises(BackendUnavailableError, match="no backend named 'gpu'"):
        find_emulated("gpu")


def test_an_emulated_proof_does_not_replace_one_of_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = discover_backends()["cpu"]
    backend.load()
    implementation = backend.implementations[0]
    key = f"{implementation.op.name}={implementation.name}"
    written: dict[str, str] = {}
    monkeypatch.setattr(proof, "keep_file", lambda path, content: written.update(text=content.decode()))
    known = {key: {"hash": proof.kernel_hash(implementation), "level": "hardware", "device": "a device"}}
    monkeypatch.setattr(proof, "read_proofs", lambda implementation: known)
    proof.write_proofs(backend, [implementation], "emulated", "an interpreter")
    assert json.loads(written["text"])["kernels"][key]["level"] == "hardware"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_says_how_far_kernels_are_proven_where_their_device_is_not(name: str) -> None:
    pytest.importorskip("triton")
    runner = CliRunner(env={"COLUMNS": "200"})
    rows = {row["name"]: row for row in json.loads(runner.invoke(app, ["backends", "-b", name, "--json"]).stdout)}
    kernels = rows[name]["kernels"]
    assert {kernel["op"] for kernel in kernels} == set(defined_ops())
    levels = {kernel["implementation"]: kernel["proof"] for kernel in kernels}
    assert set(levels.values()) <= set(proof.LEVELS)
    assert "kernels" not in rows["cpu"]
    printed = runner.invoke(app, ["backends", "-b", name]).output
    assert f"kernels of {name}, whose device is not here" in printed
    assert f"{len(kernels)} kernels: " in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_what_kernels_cannot_be_listed_without_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Backend) -> None:
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(Backend, "load", load)
    printed = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["backends", "-b", "cuda_sm90"]).output
    assert "the kernels of cuda_sm90 cannot be listed: No module named 'triton'" in printed


def test_nothing_of_blackwell_claims_to_have_run_on_hardware() -> None:
    pytest.importorskip("triton")
    backend = discover_backends()["cuda_sm100"]
    backend.load()
    assert "hardware" not in {proof.proof_level(implementation) for implementation in backend.implementations}
