"""The record that defines an op: contract, reference, tolerance, cases and determinism class, in one place.

`define_op` turns the reference into an `OpSpec`. Calling the spec runs the reference, so a reader, a test and a
fallback all execute the same lines. Backends implement specs (see `deepinfer.ops.backend`); nobody else redefines them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch

from deepinfer.ops.contract import Argument, Rules, read_arguments, static_dims
from deepinfer.ops.results import Results
from deepinfer.ops.touches import Touch

P = ParamSpec("P")
R = TypeVar("R")

API_VERSION = 1
"""Version of the op contract. A changed signature, shape, dtype or edge rule of any op raises it."""

Determinism = Literal["D0", "D1", "D2"]


@dataclass(frozen=True)
class Tolerance:
    """How far an implementation may be from the reference, and why.

    An element passes when `|got - want| <= atol + rtol * |want|`; integers and bytes must be equal.

    Attributes:
        rtol: relative part, as a plain number.
        atol: absolute part, in the unit of the result.
        sim: bound on `1 - 2<x, y> / (|x|^2 + |y|^2)` over the whole result, in float64; None when not asked.
        off_by_one: fraction of quantised codes that may differ by one step, where a bf16 ulp before the quantiser does.
        single: (rtol, atol) where no argument is bfloat16 and so nothing is rounded to it; None: as above.
        why: the reason for these numbers, shown in reports.
    """

    rtol: float = 0.0
    atol: float = 0.0
    sim: float | None = None
    off_by_one: float = 0.0
    single: tuple[float, float] | None = None
    why: str = ""

    def without_bfloat16(self) -> Tolerance:
        """The bound on results whose arguments hold no bfloat16."""
        return self if self.single is None else replace(self, rtol=self.single[0], atol=self.single[1])

    @property
    def exact(self) -> bool:
        """True when only equal bits pass."""
        return self.rtol == 0 and self.atol == 0 and self.sim is None and self.off_by_one == 0


EXACT = Tolerance(why="moves bits or computes integers; nothing to round")


@dataclass(frozen=True)
class Case:
    """One conformance case: a name and a function that builds the op's arguments.

    Attributes:
        name: states what is special about it, unique within the op.
        make: builds keyword arguments from a seeded generator; called anew for every run, since ops may mutate.
        tag: "small" runs everywhere; "real" has the model's own shapes and runs where an accelerator is.
        rows: names of the arguments whose first axis is the row axis; used to permute, pad and split batches. Another
            axis is written `name:axis`.
    """

    name: str
    make: Callable[[torch.Generator], dict[str, Any]]
    tag: Literal["small", "real"] = "small"
    rows: tuple[str, ...] = ()


def no_cases() -> Iterable[Case]:
    """An op whose cases are not written yet."""
    return ()


@dataclass(frozen=True)
class OpSpec(Generic[P, R]):
    """The definition of one op. Calling it runs the reference.

    Attributes:
        name: what the registry, reports and overrides call it.
        reference: plain PyTorch, obvious, right in float64.
        tolerance: how far an implementation may be from the reference.
        determinism: D0 repeatable; D1 a row does not depend on other rows, padding or its place; D2 nor on the phase.
        mutates: names of the arguments that are written in place; everything else is read only.
        cases: generator of conformance cases.
        module: the module that defines it, for the table in reports.
        dims: recipe of the static dimensions that models bind it with (`contract.static_dims`).
        rules: aliasing, zero rows, offsets, NaN, layout.
        touches: for large arguments, which rows or records a call reads and writes; others may be read whole.
        results: makes the results of a call before it runs; None where their size depends on values.
    """

    name: str
    reference: Callable[P, R]
    tolerance: Tolerance
    determinism: Determinism
    mutates: tuple[str, ...] = ()
    cases: Callable[[], Iterable[Case]] = no_cases
    module: str = ""
    signature: inspect.Signature = field(default_factory=inspect.Signature, repr=False)
    dims: Mapping[str, str] = field(default_factory=dict)
    rules: Rules = field(default_factory=Rules)
    touches: Mapping[str, Touch] = field(default_factory=dict)
    results: Results | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the reference."""
        return self.reference(*args, **kwargs)

    @property
    def summary(self) -> str:
        """First line of the reference's docstring."""
        return (inspect.getdoc(self.reference) or "").split("\n", 1)[0]

    @property
    def arguments(self) -> dict[str, Argument]:
        """Symbolic shape, dtypes and layout of every argument, read from the reference's docstring."""
        return read_arguments(self.reference, self.rules.packed)

    def static_dims(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The static dimensions of example arguments, as a model would bind them."""
        return static_dims(self.dims, values)

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpSpec) and other.name == self.name


_DEFINED: dict[str, OpSpec[Any, Any]] = {}  # filled by imports only, never changed at run time


def define_op(
    *,
    tolerance: Tolerance,
    determinism: Determinism,
    mutates: tuple[str, ...] = (),
    cases: Callable[[], Iterable[Case]] = no_cases,
    dims: Mapping[str, str] | None = None,
    rules: Rules | None = None,
    touches: Mapping[str, Touch] | None = None,
    results: Results | None = None,
) -> Callable[[Callable[P, R]], OpSpec[P, R]]:
    """Define an op; the decorated function is its reference.

    Args:
        tolerance: bound on the distance to the reference, with its reason.
        determinism: "D0", "D1" or "D2" (`OpSpec`).
        mutates: names of arguments written in place.
        cases: generator of conformance cases.
        dims: recipe of static dimensions (`contract.static_dims`); none when predicates have nothing to look at.
        rules: edge rules that differ from the defaults of `Rules`.
        touches: which rows or records of its large arguments a call reads and writes (`deepinfer.ops.touches`). A
            `PagedCache` must have an entry; any other tensor without one counts as read whole.
        results: shapes and dtypes of the results (`deepinfer.ops.results`); without it no implementation is captured.

    Raises:
        ValueError: a name is taken, `mutates` or `touches` names an argument that does not exist, or a cache has no
            entry in `touches`; nothing is defined.
    """

    def wrap(reference: Callable[P, R]) -> OpSpec[P, R]:
        name = getattr(reference, "__name__", "op")
        signature = inspect.signature(reference)
        unknown = set(mutates) - set(signature.parameters)
        if unknown:
            raise ValueError(f"op {name}: mutates names {sorted(unknown)}, which are not arguments")
        _check_touches(name, signature, touches or {})
        taken = _DEFINED.get(name)
        if taken is not None and taken.module != reference.__module__:
            raise ValueError(f"op {name} is already defined in {taken.module}")
        spec = OpSpec(
            name=name,
            reference=reference,
            tolerance=tolerance,
            determinism=determinism,
            mutates=mutates,
            cases=cases,
            module=reference.__module__,
            signature=signature,
            dims=dims or {},
            rules=rules or Rules(),
            touches=touches or {},
            results=results,
        )
        spec.__dict__["__doc__"] = reference.__doc__
        _DEFINED[name] = spec
        return spec

    return wrap


def _check_touches(name: str, signature: inspect.Signature, touches: Mapping[str, Touch]) -> None:
    named = set(touches) | {at for t in touches.values() for at in (*t.at, *(t.written or ())) if isinstance(at, str)}
    unknown = named - set(signature.parameters)
    if unknown:
        raise ValueError(f"op {name}: touches names {sorted(unknown)}, which are not arguments")
    caches = {key for key, parameter in signature.parameters.items() if "PagedCache" in str(parameter.annotation)}
    if caches - set(touches):
        raise ValueError(
            f"op {name}: touches does not say which records of {sorted(caches - set(touches))} a call reads or writes"
        )


def defined_ops() -> Mapping[str, OpSpec[Any, Any]]:
    """Every op defined so far, by name. Import `deepinfer.ops.catalog` first to have all of them."""
    return dict(sorted(_DEFINED.items()))
