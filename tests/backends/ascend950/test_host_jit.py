"""Compiling kernel files: the commands, what is kept, and what is said when something is missing or wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.backends.ascend950.host import build
from deepinfer.backends.ascend950.host.build import build_all
from deepinfer.backends.ascend950.host.elf import kernel_names
from deepinfer.backends.ascend950.host.jit import KERNELS, find_toolchain
from deepinfer.ops.errors import BackendUnavailableError, DeviceError

TEXT = """
extern "C" __global__ __vector__ void scale(__gm__ float* x) {}
extern "C" __global__ __cube__ void product(__gm__ float* x) {}
extern "C" __global__ __mix__(1, 2) void attend(__gm__ float* x) {}
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "family.asc"
    file.write_text(TEXT)
    return file


def _calls(home: Path) -> list[str]:
    notes = home / "bin/calls.txt"
    lines = notes.read_text().splitlines()
    notes.unlink()
    return [line for line in lines if not line.endswith("--version")]


def test_the_commands_are_those_for_the_device(fake_cann: Path, source: Path) -> None:
    find_toolchain().build(source)
    compiled, linked = _calls(fake_cann)
    words = compiled.split()
    assert words[:5] == ["bisheng", "-O2", "-std=c++20", "--npu-arch=dav-3510", "--cce-aicore-only"]
    assert words[5:9] == ["-mllvm", "-enable-hiipu-vf-loop-unroll", "-mllvm", "-cce-aicore-dcpreload-args=false"]
    own, *folders = [word.removeprefix("-I") for word in words if word.startswith("-I")]
    assert Path(own) == KERNELS
    assert [folder.split("-linux/")[1] for folder in folders] == ["asc/include", "asc/include/adv_api"]
    assert words[-3:-1] == [str(source), "-o"]
    assert linked.split()[:6] == ["ld.lld", "-m", "aicorelinux", "-Ttext", "0", "--no-mmap-output-file"]


def test_kernels_of_all_cores_are_found_once_each(fake_cann: Path, source: Path) -> None:
    assert kernel_names(find_toolchain().build(source)) == ("scale", "product", "attend")


def test_a_binary_is_kept_until_what_it_was_made_of_changes(fake_cann: Path, source: Path) -> None:
    toolchain = find_toolchain()
    first = toolchain.build(source)
    assert len(_calls(fake_cann)) == 2
    assert find_toolchain().build(source) == first
    assert not _calls(fake_cann)
    header = source.with_name("shared.h")
    header.write_text("// one\n")
    second = toolchain.build(source)
    header.write_text("// two\n")
    third = toolchain.build(source)
    source.write_text(TEXT + "// edited\n")
    fourth = toolchain.build(source)
    assert len({first, second, third, fourth}) == 4
    (fake_cann / "bin/bisheng").write_text((fake_cann / "bin/bisheng").read_text().replace("9.2.0", "9.3.0"))
    assert find_toolchain().build(source) != fourth


def test_a_mistake_is_shown_with_the_command_and_leaves_nothing(fake_cann: Path, source: Path, tmp_path: Path) -> None:
    source.write_text(TEXT + "mistake")
    with pytest.raises(DeviceError, match=r"family\.asc does not compile") as caught:
        find_toolchain().build(source)
    assert "error: unknown word 'mistake'" in str(caught.value)
    assert "--npu-arch=dav-3510" in str(caught.value)
    assert not list((tmp_path / "cache/ascend950").iterdir())


def test_a_missing_tool_is_named(fake_cann: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fake_cann / "bin/ld.lld").unlink()
    with pytest.raises(BackendUnavailableError, match=r"ld\.lld is missing beside bisheng"):
        find_toolchain()
    (fake_cann / "bin/bisheng").unlink()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BackendUnavailableError, match=f"bisheng is not in {fake_cann} or on the PATH"):
        find_toolchain()


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + bytes(100), b"#!" + bytes(80)])
def test_what_is_no_device_binary_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "k.o"
    file.write_bytes(content)
    with pytest.raises(DeviceError, match=r"k\.o (is not a whole ELF file|names no kernel)"):
        kernel_names(file)


def test_a_cut_file_is_refused(fake_cann: Path, source: Path, tmp_path: Path) -> None:
    whole = find_toolchain().build(source).read_bytes()
    file = tmp_path / "cut.o"
    for length in range(0, len(whole) - 1, 61):
        file.write_bytes(whole[:length])
        with pytest.raises(DeviceError, match=r"cut\.o"):
            kernel_names(file)


def test_all_files_are_compiled_and_told(
    fake_cann: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.asc"
    wrong.write_text("mistake")
    assert build_all([source, wrong]) == 1
    told = capsys.readouterr().out
    assert "ok     family.asc" in told and "scale, product, attend" in told
    assert "FAILED wrong.asc: wrong.asc does not compile" in told and "1 of 2 files compiled" in told


def test_without_bisheng_the_build_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert build.main() == 2
    assert "install the CANN 9.2 toolkit" in capsys.readouterr().err


def test_every_kernel_file_of_the_package_reaches_the_compiler(fake_cann: Path) -> None:
    files = sorted(KERNELS.rglob("*.asc"))
    assert build.main() == 0
    compiled = [line.split()[-3] for line in _calls(fake_cann) if line.startswith("bisheng")]
    assert [Path(name) for name in compiled] == files and files
