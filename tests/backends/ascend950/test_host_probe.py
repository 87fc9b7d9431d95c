"""The probe: each missing piece has its own message, which says what to do; the first that is missing is named."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from deepinfer.backends.ascend950.host import probe as probe_module
from deepinfer.backends.ascend950.host.cann import cann_home, cann_version, numbers
from deepinfer.ops.errors import BackendUnavailableError

RELEASE = torch.__version__.split("+")[0]


class _Driver:
    name = "Ascend950DT_9572"

    def soc_name(self) -> str:
        return self.name


@pytest.fixture
def complete(tmp_path: Path, fake_cann: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that lacks nothing; its /dev."""
    devices = tmp_path / "dev"
    devices.mkdir()
    for name in ("davinci_manager", "davinci0"):
        (devices / name).touch()
    monkeypatch.setattr(probe_module, "DEVICES", devices)
    monkeypatch.setattr(probe_module, "Acl", _Driver)
    monkeypatch.setattr(metadata, "version", lambda name: RELEASE)
    return devices


def test_a_complete_machine_is_available(complete: Path) -> None:
    answer = probe_module.probe()
    assert answer.available and not answer.reason


def test_the_driver_comes_first_then_its_devices(complete: Path) -> None:
    (complete / "davinci0").unlink()
    assert "no device" in probe_module.probe().reason and "container" in probe_module.probe().reason
    (complete / "davinci_manager").unlink()
    assert "no Ascend driver is loaded" in probe_module.probe().reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("version=9.1.0\n", r"CANN 9.1.0 in .* is too old; install CANN 9.2 or newer and run its set_env.sh"),
        ("version=8.5.RC1\n", "CANN 8.5.RC1 in"),
        ("package=toolkit\n", "does not say which CANN it is"),
        ("version=9.2.RC1\n", None),
        ("version=9.10.0\n", None),
        ("version=10.0\n", None),
    ],
)
def test_cann_is_recent_enough_or_said_to_be_old(
    complete: Path, fake_cann: Path, text: str, reason: str | None
) -> None:
    (fake_cann / f"{platform.machine()}-linux/ascend_toolkit_install.info").write_text(text)
    answer = probe_module.probe()
    assert answer.available is (reason is None)
    if reason is not None:
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(answer.reason)


def test_no_cann_at_all_is_said(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "cann_home", lambda: None)
    assert "CANN is not installed or not set up" in probe_module.probe().reason


def test_torch_npu_is_missing_or_does_not_go_with_torch(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", lambda name: "2.1.0.post3")
    reason = probe_module.probe().reason
    assert f"torch_npu 2.1.0.post3 does not go with torch {RELEASE}; pip install torch_npu=={RELEASE}" in reason
    monkeypatch.setattr(metadata, "version", missing)
    assert f"torch_npu is not installed; pip install torch_npu=={RELEASE}" in probe_module.probe().reason
    monkeypatch.setattr(metadata, "version", lambda name: f"{RELEASE}.post2")
    assert probe_module.probe().available


def test_another_chip_or_a_silent_driver_is_named(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Driver, "name", "Ascend910_9392")
    assert "the chip is Ascend910_9392; these kernels are made for Ascend950" in probe_module.probe().reason
    monkeypatch.setattr(_Driver, "name", "")
    assert "does not name the chip" in probe_module.probe().reason

    def broken() -> None:
        raise BackendUnavailableError("libascendcl.so cannot be loaded")

    monkeypatch.setattr(probe_module, "Acl", broken)
    assert probe_module.probe().reason == "libascendcl.so cannot be loaded"


def test_an_installation_is_found_by_its_variable_and_read(fake_cann: Path) -> None:
    assert cann_home() == fake_cann
    assert cann_version(fake_cann) == "9.2.0"
    assert cann_version(fake_cann / "elsewhere") == ""


@pytest.mark.parametrize(("text", "want"), [("9.2.RC1", (9, 2)), ("2.13.0.post2", (2, 13, 0)), ("", ()), ("x", ())])
def test_versions_are_read_as_far_as_they_are_numbers(text: str, want: tuple[int, ...]) -> None:
    assert numbers(text) == want


def test_probing_imports_neither_torch_npu_nor_a_kernel() -> None:
    program = (
        "import sys; from deepinfer.backends.ascend950.host.probe import probe; answer = probe()\n"
        "assert answer.available or answer.reason\n"
        "assert 'torch_npu' not in sys.modules and 'deepinfer.backends.ascend950.host.jit' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
