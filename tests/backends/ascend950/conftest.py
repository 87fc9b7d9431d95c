"""What the tests of the host path share: the torch_npu wheel (unpacked, never installed), a driver and a compiler."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer.backends.ascend950.host.acl import Acl
from deepinfer.backends.ascend950.host.jit import find_toolchain
from deepinfer.backends.ascend950.host.launcher import Launcher
from deepinfer.backends.ascend950.host.prototypes import CONSTANTS
from deepinfer.backends.ascend950.host.runtime import AscendRuntime
from deepinfer.backends.ascend950.host.torch_device import Queue
from deepinfer.backends.ascend950.launch import Program
from deepinfer.backends.ascend950.twin_build import missing_compiler
from deepinfer.ops.errors import OutOfDeviceMemoryError

WHOLE_CONTRACT = "test_conformance.py"
SHARDS = Path(__file__).resolve().parents[3] / "tools" / "conformance_shards.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The whole contract is judged last: its processes run beside the other tests."""
    items.sort(key=lambda item: item.path.name == WHOLE_CONTRACT and item.path.parent == Path(__file__).parent)


@pytest.fixture(scope="session", autouse=True)
def whole_contract(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Path, subprocess.Popen[bytes]]]:
    """Conformance of all ops and of the layers, each in a process; reports come into the folders that name them."""
    if missing_compiler() or not any(item.path.name == WHOLE_CONTRACT for item in request.session.items):
        yield {}
        return
    ops, layers = (tmp_path_factory.mktemp(name) for name in ("ops", "layers"))
    emulated = ("--backend", "ascend950", "--emulate", "--report")
    levels = ("--level", "2", "--op", "layer: *", "--quiet")
    commands = {
        ops: (str(SHARDS), *emulated, str(ops), "--jobs", "1"),
        layers: ("-m", "deepinfer.entrypoints.cli", "conformance", *emulated, str(layers), *levels),
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = {}
    for folder, command in commands.items():
        with (folder / "said.txt").open("wb") as said:  # a pipe that nobody reads for minutes would fill up
            started[folder] = subprocess.Popen(
                [sys.executable, *command], env=environment, stdout=said, stderr=subprocess.STDOUT
            )
    yield started
    for process in started.values():
        if process.poll() is None:  # the session ended early
            process.kill()
        process.wait()


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepinfer-tests"


@pytest.fixture(scope="session")
def npu_wheel() -> Path:
    """Folder of the `torch_npu` package that goes with this torch, from the configured index.

    It is unpacked beside, not installed: torch loads every installed device package by itself, and this one wants a
    driver.
    """
    release = torch.__version__.split("+")[0]
    folder = _cache() / f"torch_npu-{release}-cp{sys.version_info.major}{sys.version_info.minor}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"torch_npu=={release}"]
            done = subprocess.run([*command, "--dest", work], capture_output=True, text=True, timeout=300)
            if done.returncode:
                pytest.skip(f"torch_npu {release} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
            (wheel,) = Path(work).glob("torch_npu*.whl")
            unpacked = Path(work) / "unpacked"
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
            try:
                unpacked.rename(folder)
            except OSError:  # another run was faster; what it made is the same
                assert folder.exists()
    return folder / "torch_npu"


@pytest.fixture(scope="session")
def fake_library(npu_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver of `fake_acl.cpp`, compiled against the real headers."""
    library = tmp_path_factory.mktemp("acl") / "libfakeacl.so"
    source = Path(__file__).with_name("fake_acl.cpp")
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-I", str(npu_wheel / "include")]
    subprocess.run([*command, str(source), "-o", str(library)], check=True, timeout=120)
    return library


@pytest.fixture
def fake_acl(fake_library: Path, tmp_path: Path) -> Iterator[FakeAcl]:
    """A driver of this test alone: its own copy of the library has its own state."""
    private = tmp_path / "libascendcl.so"
    shutil.copy(fake_library, private)
    yield FakeAcl(private)


class FakeAcl(Acl):
    """The driver's calls, and what only a fake one has: its log, failures on demand, and kernels in Python."""

    def log(self) -> list[str]:
        """Calls since the last look, each with its details."""
        self.library.fake_acl_log.restype = ctypes.c_char_p
        lines = self.library.fake_acl_log().decode().splitlines()
        self.library.fake_acl_clear_log()
        return lines

    def fail_next(self, name: str, code: int = 507899) -> None:
        """Let the next call of a function return a code."""
        self.library.fake_acl_fail_next(name.encode(), code)

    def on_kernel(self, run: Callable[[str, int, bytes], None]) -> None:
        """Call `run(name, blocks, packed arguments)` when a launched kernel's turn has come."""
        kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
        self._callback = kind(lambda name, blocks, at, size: run(name.decode(), blocks, ctypes.string_at(at, size)))
        self.library.fake_acl_on_kernel(self._callback)


class HostTorch:
    """`TorchDevice` over a fake driver: device and pinned memory from it, copies on its streams.

    Memory is kept until the test ends, as allocators keep it until the device is done with it.
    """

    def __init__(self, acl: FakeAcl) -> None:
        self.device = torch.device("cpu")
        self.acl = acl
        self._pinned: list[tuple[int, int]] = []
        self._local = threading.local()

    def _tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        memory = (ctypes.c_char * num_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = max(torch.Size(shape).numel() * dtype.itemsize, 1)
        try:
            address = self.acl.made("aclrtMalloc", num_bytes, CONSTANTS["ACL_MEM_MALLOC_HUGE_FIRST"])
        except OutOfDeviceMemoryError as error:
            raise torch.OutOfMemoryError(str(error)) from error
        return self._tensor(address, shape, dtype)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = max(torch.Size(shape).numel() * dtype.itemsize, 1)
        address = self.acl.made("aclrtMallocHost", num_bytes)
        self._pinned.append((address, num_bytes))
        return self._tensor(address, shape, dtype)

    def is_pinned(self, host: torch.Tensor) -> bool:
        return any(start <= host.data_ptr() < start + size for start, size in self._pinned)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, later: bool) -> None:
        if target.numel() == 0:
            return
        if not (target.is_contiguous() and source.is_contiguous()):  # rows with gaps: not what is tested here
            self.acl.call("aclrtSynchronizeStream", self.current_queue().handle)
            target.copy_(source)
            return
        if later:  # a driver reads and writes pageable memory at a time of its own choice
            assert self.is_pinned(source) or self.is_pinned(target)
        kind = CONSTANTS["ACL_MEMCPY_DEVICE_TO_HOST" if self.is_pinned(target) else "ACL_MEMCPY_HOST_TO_DEVICE"]
        queue = self.current_queue().handle
        pair = (target.data_ptr(), target.nbytes, source.data_ptr(), source.nbytes)
        self.acl.call("aclrtMemcpyAsync", *pair, kind, queue)
        if not later:
            self.acl.call("aclrtSynchronizeStream", queue)

    def fill_zero(self, tensor: torch.Tensor) -> None:
        queue = self.current_queue().handle
        self.acl.call("aclrtMemsetAsync", tensor.data_ptr(), tensor.nbytes, 0, tensor.nbytes, queue)

    def unused_bytes(self) -> int:
        return 0

    def new_queue(self) -> Queue:
        return Queue(self.acl.made("aclrtCreateStream"))

    def current_queue(self) -> Queue:
        if not hasattr(self._local, "queue"):
            self._local.queue = self.new_queue()
        return self._local.queue

    @contextmanager
    def use_queue(self, queue: Queue) -> Iterator[None]:
        before, self._local.queue = self.current_queue(), queue
        try:
            yield
        finally:
            self._local.queue = before

    @contextmanager
    def kept_allocations(self) -> Iterator[object]:
        yield self


@pytest.fixture
def runtime(fake_acl: FakeAcl) -> AscendRuntime:
    """The runtime over a fake driver."""
    fake_acl.start(0)
    return AscendRuntime(HostTorch(fake_acl), fake_acl)


@pytest.fixture
def launcher(runtime: AscendRuntime, fake_cann: Path) -> Launcher:
    """A launcher on that runtime's current stream, with the fake compiler."""
    return Launcher(runtime.acl, find_toolchain, runtime.current_handle)


@pytest.fixture
def fake_cann(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CANN installation whose compiler writes an ELF file with a section per kernel, and notes what it was told.

    A text with the word `mistake` does not compile.
    """
    home = tmp_path / "cann"
    folder = home / f"{platform.machine()}-linux"
    (home / "bin").mkdir(parents=True)
    (folder / "asc/include/adv_api").mkdir(parents=True)
    (folder / "ascend_toolkit_install.info").write_text("package_name=Ascend-cann-toolkit\nversion=9.2.0\n")
    for name in ("bisheng", "ld.lld"):
        tool = home / "bin" / name
        tool.write_text(f"#!{sys.executable}\n" + Path(__file__).with_name("fake_bisheng.py").read_text())
        tool.chmod(0o755)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))
    return home


class VectorCases:
    """The cases of `vector_kernels.asc`: one vector intrinsic each, run in the twin on registers of the test's choice.

    A case is named by its line, such as "BINARY(asc_add, f32)".
    """

    def __init__(self) -> None:
        source = Path(__file__).with_name("vector_kernels.asc")
        lines = source.read_text().split("// cases\n")[1].split("// end of cases")[0].splitlines()
        self.number = {line: i for i, line in enumerate(lines)}
        self._run = Program(source).kernel("run", "out!, in, number: i32, rounds: i32, real: f32, whole: i32")

    def names(self, kind: str) -> list[str]:
        """Lines of one kind, in their order."""
        return [line for line in self.number if line.startswith(kind + "(")]

    def __call__(
        self,
        line: str,
        *sources: np.ndarray,
        mask: np.ndarray | None = None,
        predicates: Sequence[np.ndarray] = (),
        real: float = 0.0,
        whole: int = 0,
        fill: int = 0xA5,
    ) -> np.ndarray:
        """Run a case.

        Args:
            line: its name.
            sources: up to three, [rounds, 256 bytes] of any type; the first gives the number of rounds.
            mask: [256] or [rounds, 256] of zeros and ones, a bit a byte of a register; None sets them all.
            predicates: up to two more of these, [256] each.
            real: the number that an intrinsic with a float takes.
            whole: the integer that a case takes.
            fill: what the output holds before.

        Returns:
            [rounds, 1024] uint8.
        """
        rounds = len(sources[0]) if sources else 1
        given = np.zeros((rounds, 1024), np.uint8)
        for i, source in enumerate(sources):
            given[:, 256 * i : 256 * (i + 1)] = np.ascontiguousarray(source).view(np.uint8).reshape(rounds, 256)
        bits = np.ones(256, np.uint8) if mask is None else np.asarray(mask, np.uint8)
        given[:, 768:800] = np.packbits(bits, axis=-1, bitorder="little")
        for i, predicate in enumerate(predicates):
            given[:, 800 + 32 * i : 832 + 32 * i] = np.packbits(predicate, bitorder="little")
        out = torch.full((rounds, 1024), fill, dtype=torch.uint8)
        self._run(1, out, torch.from_numpy(given), self.number[line], rounds, real, whole)
        return out.numpy()


@pytest.fixture(scope="session")
def vector_cases() -> VectorCases:
    """The compiled cases of `vector_kernels.asc`."""
    reason = missing_compiler()
    if reason is not None:
        pytest.skip(reason)
    return VectorCases()
