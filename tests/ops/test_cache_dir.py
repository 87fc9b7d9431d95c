"""Where things are kept, and that they are whole or not there."""

import errno
import os
import stat
from pathlib import Path

import pytest

from deepinfer.ops.cache_dir import cache_dir, keep_file


def test_the_folder_is_named_by_variables_and_empty_ones_name_none(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "deepinfer"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "deepinfer"


def test_a_file_is_made_with_its_folder_and_replaced_whole(tmp_path) -> None:
    path = tmp_path / "a" / "b" / "kernel.bin"
    before = os.umask(0o022)
    try:
        for content in (b"one", b"two and more", b""):
            keep_file(path, content)
            assert path.read_bytes() == content
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644  # others of the machine may read it
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file_and_no_part(tmp_path, monkeypatch) -> None:
    path = tmp_path / "kernel.bin"
    keep_file(path, b"old")

    def full(part, content):
        with open(part, "wb") as file:
            file.write(content[:1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(part))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        keep_file(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_an_error_of_the_system(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        keep_file(tmp_path / "file" / "kernel.bin", b"x")
