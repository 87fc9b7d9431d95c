"""How far a kernel is proven, and what must happen before an unproven one is used.

A proof is bound to the kernel's source: `proof.json` beside the backend's code names each kernel, the hash of its
source and the level it reached, and an edited kernel falls to "compiled". Whatever is below "hardware" has to pass its
own cases on the user's device first. The answer is kept in a file by kernel, device and driver, so this happens once.

Running cases is the conformance suite's business; a `Gate` is given a function that does it, so this file needs nothing
above the op layer.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from deepinfer.ops.backend import Backend, Implementation
from deepinfer.ops.cache_dir import cache_dir, keep_file
from deepinfer.ops.runtime import Runtime
from deepinfer.ops.spec import API_VERSION

ProofLevel = Literal["hardware", "emulated", "compiled"]
"""hardware: passed on that device type; emulated: passed in an interpreter or twin; compiled: only compiles."""

PROOF_FILE = "proof.json"
BUDGET_SECONDS = 60.0
VERDICT_FORM = "complete"
"""Part of the key of a kept verdict: entries without it may rest on a part of the cases, and are not read."""
LEVELS: tuple[ProofLevel, ...] = ("compiled", "emulated", "hardware")


Cause = Literal["cases", "time", "error"]
"""What a verdict rests on: results of cases; time ran out before the last one; something was raised."""


@dataclass(frozen=True)
class Verdict:
    """What running a kernel's cases gave.

    Attributes:
        passed: all of them ran and held.
        detail: the first failing case, or why there was nothing to run.
        cause: "cases" is an answer that another run would give again, so it is kept. The others are of this run only: a
            device that is full or busy says nothing about a kernel.
    """

    passed: bool
    detail: str = ""
    cause: Cause = "cases"


Check = Callable[[Implementation, float], Verdict]
"""Runs the cases of an implementation, for at most so many seconds."""


def source_files(implementation: Implementation) -> list[Path]:
    """The files that a kernel is made of: its module, and its globs beside it."""
    module = sys.modules.get(implementation.module)
    name = getattr(module, "__file__", None)
    if not name:
        return []
    file = Path(name)
    extra = {found for pattern in implementation.sources for found in file.parent.glob(pattern) if found.is_file()}
    return [file, *sorted(extra)]


def kernel_hash(implementation: Implementation) -> str:
    """SHA-256 over names and contents of the kernel's source files; the place of the package does not matter."""
    digest = hashlib.sha256(implementation.op.name.encode())
    for file in source_files(implementation):
        content = file.read_bytes()
        digest.update(f"\0{file.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def read_proofs(implementation: Implementation) -> Mapping[str, Any]:
    """Entries of the `proof.json` beside a kernel's module; empty when there is none or it is of another contract."""
    files = source_files(implementation)
    if not files:
        return {}
    try:
        data = json.loads((files[0].parent / PROOF_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(data, dict) or data.get("contract") != API_VERSION:
        return {}
    return cast("Mapping[str, Any]", data.get("kernels", {}))


def proof_level(implementation: Implementation) -> ProofLevel:
    """How far a kernel is proven, as its source stands."""
    entry = read_proofs(implementation).get(f"{implementation.op.name}={implementation.name}")
    if not isinstance(entry, dict) or entry.get("hash") != kernel_hash(implementation):
        return "compiled"
    level = entry.get("level")
    return level if level in LEVELS else "compiled"


def write_proofs(backend: Backend, proven: Iterable[Implementation], level: ProofLevel, device: str) -> list[Path]:
    """Record kernels that passed; entries of kernels whose source has changed are dropped, better proofs are kept.

    Args:
        backend: whose kernels these are.
        proven: those that passed all their cases.
        level: what that shows.
        device: where, in words.

    Returns:
        The files written, one per folder of kernels.
    """
    folders: dict[Path, list[Implementation]] = {}
    for implementation in backend.implementations:
        files = source_files(implementation)
        if files:
            folders.setdefault(files[0].parent, []).append(implementation)
    names = {f"{i.op.name}={i.name}" for i in proven}
    written = []
    for folder, implementations in folders.items():
        kernels: dict[str, Any] = {}
        for implementation in implementations:
            key = f"{implementation.op.name}={implementation.name}"
            own = kernel_hash(implementation)
            old = read_proofs(implementation).get(key)
            before = old if isinstance(old, dict) and old.get("hash") == own else None
            if key in names and not (before is not None and _above(before.get("level"), level)):
                kernels[key] = {"hash": own, "level": level, "device": device}
            elif before is not None:
                kernels[key] = before
        content = {"contract": API_VERSION, "kernels": dict(sorted(kernels.items()))}
        path = folder / PROOF_FILE
        keep_file(path, (json.dumps(content, indent=1) + "\n").encode())
        written.append(path)
    return written


def _above(old: Any, new: ProofLevel) -> bool:
    """Whether an older proof of the same source says more than a new one."""
    return old in LEVELS and LEVELS.index(old) > LEVELS.index(new)


def cache_file() -> Path:
    """Where verdicts are kept: `DEEPINFER_CACHE_DIR`, else the user's cache folder."""
    return cache_dir() / "verified.json"


def device_facts(runtime: Runtime) -> str:
    """Device and driver in words, as runtimes name them (`device_name`, `driver_version`)."""
    name = getattr(runtime, "device_name", "") or runtime.device.type
    return f"{name} {getattr(runtime, 'driver_version', '')}".strip()


@dataclass
class Gate:
    """Decides whether an implementation may run here; give it to an `OpTable`.

    Args:
        runtime: the device.
        check: runs the cases of an implementation.
        file: where verdicts are kept.
        budget_seconds: for all verifications of this gate together.
        tell: shown to the user, a sentence each.
        clock: seconds; for tests.
    """

    runtime: Runtime
    check: Check
    file: Path = field(default_factory=cache_file)
    budget_seconds: float = BUDGET_SECONDS
    tell: Callable[[str], None] = lambda message: print(message, file=sys.stderr)
    clock: Callable[[], float] = time.monotonic
    _spent: float = field(default=0.0, repr=False)
    _answers: dict[str, bool] = field(default_factory=dict, repr=False)

    def __call__(self, implementation: Implementation) -> bool:
        """True when the kernel is proven, was verified here before, or passes now."""
        if proof_level(implementation) == "hardware":
            return True
        key = self.key(implementation)
        if key not in self._answers:
            self._answers[key] = self._decide(implementation)
        return self._answers[key]

    def key(self, implementation: Implementation) -> str:
        """Form of the entry, contract, kernel with its source, device and driver."""
        name = f"{implementation.op.name}={implementation.name}"
        return f"{VERDICT_FORM}|{API_VERSION}|{name}|{kernel_hash(implementation)}|{device_facts(self.runtime)}"

    def known(self, implementation: Implementation) -> Verdict | None:
        """The verdict of an earlier verification on this device; None when there was none."""
        entry = self._read().get(self.key(implementation))
        if not isinstance(entry, dict):
            return None
        return Verdict(bool(entry.get("passed")), str(entry.get("detail", "")))

    def _decide(self, implementation: Implementation) -> bool:
        known = self.known(implementation)
        if known is not None:
            verdict = known
        elif self._spent >= self.budget_seconds:
            verdict = Verdict(False, cause="time")
        else:
            verdict = self.verify(implementation)
        if not verdict.passed:
            self.tell(f"{implementation.name} {self._excuse(verdict)}; next is another one of {implementation.op.name}")
        return verdict.passed

    def _excuse(self, verdict: Verdict) -> str:
        """Why a kernel is not used, in words that go on after its name."""
        if verdict.cause == "time":
            detail = f" ({verdict.detail})" if verdict.detail else ""
            return (
                f"is not used: not verified within {self.budget_seconds:.0f} s on this device{detail}, "
                "`deepinfer verify` takes its time and remembers"
            )
        if verdict.cause == "error":
            return f"is not used: it could not be verified on this device now ({verdict.detail})"
        return f"is not used: it fails its own cases on this device ({verdict.detail})"

    def verify(self, implementation: Implementation) -> Verdict:
        """Run the cases now; the verdict is remembered where it rests on them alone."""
        began = self.clock()
        try:
            verdict = self.check(implementation, max(self.budget_seconds - self._spent, 0.0))
        except Exception as error:  # a kernel may raise anything; it is not used then
            verdict = Verdict(False, f"{type(error).__name__}: {error}", "error")
        self._spent += self.clock() - began
        if verdict.cause != "cases":
            return verdict
        stored = self._read()
        stored[self.key(implementation)] = {"passed": verdict.passed, "detail": verdict.detail}
        try:
            keep_file(self.file, (json.dumps(stored, indent=1) + "\n").encode())
        except OSError as error:
            self.tell(f"the verdict on {implementation.name} could not be kept in {self.file}: {error}")
        return verdict

    def _read(self) -> dict[str, Any]:
        try:
            data = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}
