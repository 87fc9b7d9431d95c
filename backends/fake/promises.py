"""Capturable plans on a device that believes nobody: what they promise is held against what they do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepinfer.backends.fake.errors import BrokenPromiseError
from deepinfer.ops.backend import Plan
from deepinfer.ops.results import nothing
from deepinfer.ops.spec import OpSpec
from deepinfer.ops.trees import tensors_of

if TYPE_CHECKING:
    from deepinfer.backends.fake.runtime import FakeRuntime


@dataclass(frozen=True)
class WatchedPlan:
    """A capturable plan, run where allocating and waiting are errors.

    Attributes:
        op: what it runs.
        plan: whose promise it is.
        runtime: the device.
    """

    op: OpSpec[..., Any]
    plan: Plan
    runtime: FakeRuntime
    capturable: bool = True

    @property
    def scratch_bytes(self) -> int:
        """Of the plan."""
        return self.plan.scratch_bytes

    @property
    def persistent_bytes(self) -> int:
        """Of the plan."""
        return self.plan.persistent_bytes

    def run(self, *inputs: Any, **options: Any) -> Any:
        """Run the plan.

        Raises:
            BrokenPromiseError: it allocated, waited, or returned other memory than `out`.
        """
        out = options.get("out")
        if out is None and self.op.results is not nothing:
            return self.plan.run(*inputs, **options)  # without `out` it may make its results
        with self.runtime.running(self.op.name):
            result = self.plan.run(*inputs, **options)
        given, got = tensors_of(out), tensors_of(result)
        if len(got) != len(given) or any(mine is not theirs for mine, theirs in zip(got, given, strict=True)):
            raise BrokenPromiseError(f"the plan of {self.op.name} was given `out` and returned other memory")
        return result
