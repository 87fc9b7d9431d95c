"""A static check of how a compiled launch synchronises: races, deadlocks, barriers, tensor memory; no GPU is needed.

The check is the verifier `sentryward`, which reads PTX for one grid and one set of numbers and proves what it says for
every order in which threads may run. It sees neither rounding nor fences, and it is young: what it does not understand
is inconclusive, not right. With a reference in PyTorch it can also prove that results are equal over the reals.

Triton lets every lane that holds a copy of a value store it, all to one place in shared memory. The verifier does not
look at values, so it calls such a store a race with itself; it is then taken out, and the rest is checked without it.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.backends.nvidia.ahead import WARP, Compiled, signature_of
from deepinfer.backends.nvidia.launch import Launch

CLEAN: Final = frozenset({"race_free", "verified"})
FINDINGS: Final = frozenset({"potential_race", "not_wellsynced", "invalid_lifecycle", "equivalence_not_proven"})
INCONCLUSIVE: Final = frozenset(
    {"unsupported", "timeout", "memory_budget_exceeded", "analysis_budget_exceeded", "allocation_failed"}
)
_LEAKS: Final = "tmem_missing_dealloc"
"""What the verifier says of tensor memory that is not given back, though it calls that unsupported."""
_SCALARS: Final = {"i32": "u32", "i64": "u64", "u32": "u32", "fp32": "f32"}
_LISTS: Final = {torch.int32: ("u32", 1 << 32), torch.int64: ("u64", 1 << 64)}
_HIDDEN: Final = ("global_scratch", "profile_scratch")
"""Pointers that the compiler adds behind a kernel's own parameters; ours have no use for them."""
_MEMORY_MIB: Final = 6000
_STORE: Final = re.compile(r"\b(st\.shared|stmatrix)\b")
_PLACE: Final = re.compile(r"\s*\.(loc|file)\b")
_MOST_COPIES: Final = 24
"""Stores of copies that are taken out of a kernel before it counts as a finding."""


@dataclass(frozen=True)
class Outcome:
    """What the verifier said.

    Attributes:
        result: one of `CLEAN`, `FINDINGS` or `INCONCLUSIVE`.
        detail: its first words on why it is not clean.
        seconds: how long it took.
        copies: lines of the PTX that were taken out: stores with which several lanes write one value to one place.
    """

    result: str
    detail: str
    seconds: float
    copies: tuple[int, ...] = ()

    @property
    def clean(self) -> bool:
        """Proven."""
        return self.result in CLEAN


@dataclass(frozen=True)
class Equality:
    """A claim that a launch computes a PyTorch function, to be proven over the reals.

    Attributes:
        source: text of a module with a function `reference(...)` of tensors.
        inputs: the function's arguments in order: name of the kernel's parameter, and the tensor.
        output: name of the kernel's parameter, and the tensor.
    """

    source: str
    inputs: tuple[tuple[str, Tensor], ...]
    output: tuple[str, Tensor]


def kernel_input(launch: Launch, compiled: Compiled, known: Iterable[Tensor] = ()) -> dict[str, Any]:
    """What the verifier must know of a launch: grid, shared memory, numbers, and lists of integers that steer it.

    Args:
        launch: as recorded.
        compiled: the same, compiled.
        known: tensors whose contents are real; integer lists among the launch's arguments that share their memory are
            told, so that addresses and branches which they decide have values.
    """
    memory = {tensor.untyped_storage().data_ptr() for tensor in known}
    kinds, values = dict(signature_of(launch)), dict(zip(launch.kernel.jit.arg_names, launch.args, strict=False))
    names = [name for name, kind in kinds.items() if kind != "constexpr"]
    pointers, numbers, lists = [], [], []
    for place, name in enumerate((*names, *_HIDDEN)):
        value = values.get(name)
        if name in _HIDDEN or isinstance(value, Tensor):
            pointers.append({"parameter": place, "type": "pointer", "space": "global", "object": name})
        else:
            numbers.append({"parameter": place, **_number(kinds[name], value)})
        if isinstance(value, Tensor) and value.dtype in _LISTS and value.untyped_storage().data_ptr() in memory:
            kind, modulus = _LISTS[value.dtype]
            content = [number % modulus for number in value.flatten().tolist()]
            if content:
                lists.append({"parameter": place, "element_type": kind, "shapes": [content]})
    return {
        "schema": "spverify.kernel-input/v1",
        "launch": {
            "grid_dim": [*launch.grid, 1, 1][:3],
            "block_dim": [WARP * launch.num_warps, 1, 1],
            "dynamic_shared_bytes": compiled.shared_bytes,
        },
        "declarations": pointers,
        "arguments": numbers,
        "shape_arrays": lists,
    }


def _number(kind: str, value: Any) -> dict[str, Any]:
    if kind == "fp32":
        return {"type": "f32", "value": float(value)}
    return {"type": _SCALARS[kind], "value": int(value) % (1 << (64 if kind == "i64" else 32))}


def check(ptx: str, given: Mapping[str, Any], *, equality: Equality | None = None, seconds: float = 120.0) -> Outcome:
    """Run the verifier.

    Args:
        ptx: text of the kernel; it need not be what was compiled, so that faults can be planted.
        given: from `kernel_input`.
        equality: also prove this.
        seconds: time allowed for one run.

    Raises:
        RuntimeError: the verifier could not read what it was given, or broke.
    """
    began = time.monotonic()
    lines = _without_places(ptx)
    lists = list(given["shape_arrays"])
    copies: list[int] = []
    while True:
        answer = _run("\n".join(lines) + "\n", {**given, "shape_arrays": lists}, equality, seconds)
        written = _written_list(answer, lists)
        line = _store_of_copies(answer, lines)
        if written is not None:
            lists.remove(written)  # a list that the kernel also writes cannot be told
        elif line is not None and len(copies) < _MOST_COPIES:
            copies.append(line)
            lines[line - 1] = ""
        else:
            break
    diagnostics = answer.get("diagnostics") or ()
    leaks = any(diagnostic.get("code") == _LEAKS for diagnostic in diagnostics)
    result = "invalid_lifecycle" if leaks else str(answer.get("result"))
    said = "; ".join(f"{d.get('code')}: {d.get('message', '')}" for d in diagnostics)[:400]
    if result not in CLEAN | FINDINGS | INCONCLUSIVE:
        raise RuntimeError(f"the verifier gave {result}: {said}")
    return Outcome(result, said, time.monotonic() - began, tuple(sorted(copies)))


def _run(ptx: str, given: Mapping[str, Any], equality: Equality | None, seconds: float) -> dict[str, Any]:
    from sentryward import verify

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        kernel, numbers = place / "kernel.ptx", place / "input.json"
        kernel.write_text(ptx)
        numbers.write_text(json.dumps(given))
        options: dict[str, Any] = {"timeout_seconds": seconds, "memory_limit_mib": _MEMORY_MIB}
        if equality is not None:
            options["reference"] = place / "example_reference.py"
            options["reference_binding"] = place / "binding.json"
            options["reference"].write_text(equality.source)
            options["reference_binding"].write_text(json.dumps(_binding(equality)))
        answer: dict[str, Any] = verify(kernel, input=numbers, **options)
        return answer


def _without_places(ptx: str) -> list[str]:
    """Lines of a kernel without what says where in its source they come from, so that findings name lines of PTX."""
    body = ptx.partition("\n\t.section")[0]
    return ["" if _PLACE.match(line) else line for line in body.splitlines()]


def _store_of_copies(answer: Mapping[str, Any], lines: list[str]) -> int | None:
    """The line of a store in a race with itself alone, over the same bytes of a block's shared memory."""
    races: list[Any] = answer.get("races") or []
    if answer.get("result") != "potential_race" or len(races) != 1:
        return None
    first, second, region = races[0]["first"], races[0]["second"], races[0]["region"]
    line = first.get("location", {}).get("line")
    same = line is not None and line == second.get("location", {}).get("line")
    whole = first.get("bytes") == second.get("bytes") == region.get("bytes")
    stored = region.get("address_space") == "shared" and {first.get("mode"), second.get("mode")} == {"write"}
    return line if same and whole and stored and _STORE.search(lines[line - 1]) else None


def _written_list(answer: Mapping[str, Any], lists: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The list that the verifier refuses because the kernel writes it."""
    for diagnostic in answer.get("diagnostics") or ():
        if diagnostic.get("code") == "constant_input_modified":
            for entry in lists:
                if f"input.arg{entry['parameter']}." in f"{diagnostic.get('message', '')}.":
                    return entry
    return None


def _binding(equality: Equality) -> dict[str, Any]:
    layouts = {}
    for name, tensor in equality.inputs:
        strides = [stride * tensor.element_size() for stride in tensor.stride()]
        layouts[name] = {
            "source_offset": 0,
            "target_offset": 0,
            "element_bytes": tensor.element_size(),
            "shape": list(tensor.shape),
            "source_strides_bytes": strides,
            "target_strides_bytes": strides,
        }
    name, result = equality.output
    strides = [stride * result.element_size() for stride in result.stride()]
    return {
        "schema": "spverify.equivalence-mapping.v1",
        "output_value_semantics": "ideal_real",
        "left_inputs": {"allocations": {name: name for name in layouts}, "parameters": {}, "layouts": layouts},
        "right_inputs": {
            "allocations": {_object(name): name for name in layouts},
            "parameters": {},
            "layouts": {_object(name): layout for name, layout in layouts.items()},
        },
        "outputs": {
            "kind": "dense_tensor",
            "left_allocation": "result",
            "right_allocation": _object(name),
            "left_offset": 0,
            "right_offset": 0,
            "element_bytes": result.element_size(),
            "shape": list(result.shape),
            "left_strides_bytes": strides,
            "right_strides_bytes": strides,
        },
        "reference": {
            "arguments": [
                {"name": name, "allocation": name, "dtype": str(tensor.dtype).removeprefix("torch.")}
                for name, tensor in equality.inputs
            ]
        },
    }


def _object(name: str) -> str:
    """A kernel's global object as the verifier spells it."""
    return f"6:global{len(name)}:{name}"
