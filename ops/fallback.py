"""The reference on a device that PyTorch cannot compute on: through the host, copying what the call touches.

Arguments come to the host, the reference runs there, results and written arguments go back. Of an argument with a
`Touch` in the contract only the rows and records that this call names are copied, so the cost follows the step and not
the size of a pool. The host waits for every copy: such a step is neither captured nor asynchronous.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.ops.runtime import Runtime
from deepinfer.ops.spec import OpSpec
from deepinfer.ops.touches import Touch, num_units, runs, views
from deepinfer.ops.trees import map_tensors, tensors_of

THROUGH_HOST: Final = "reference (through the host)"
"""What tables call it."""


@dataclass(frozen=True)
class HostPlan:
    """The reference of an op as a plan over tensors of a device that PyTorch does not compute on.

    Attributes:
        op: the contract.
        runtime: the device; asked for copies and views only.
    """

    op: OpSpec[..., Any]
    runtime: Runtime
    scratch_bytes: int = 0
    persistent_bytes: int = 0
    capturable: bool = False

    def run(self, *inputs: Any, **options: Any) -> Any:
        """Copy, compute, copy back; results are new device memory.

        Args:
            inputs: arguments by position.
            options: arguments by name.
        """
        bound = self.op.signature.bind(*inputs, **options)
        bound.apply_defaults()
        with self.runtime.sync_guard.permit(f"the reference of {self.op.name} runs on the host"):
            return self._run(bound.arguments)

    def _run(self, there: dict[str, Any]) -> Any:
        touches = {name: touch for name, touch in self.op.touches.items() if not self._stays(name, there[name])}
        here = {name: value if name in touches else self._fetch(name, value) for name, value in there.items()}
        seen = SimpleNamespace(**here)
        here |= {name: self._fetch_part(there[name], touch, seen) for name, touch in touches.items()}
        result = self.op.reference(**here)
        for name in self.op.mutates:
            self._write_back(there[name], here[name], touches.get(name), seen)
        return map_tensors(result, self.runtime.to_device)

    def _stays(self, name: str, value: Any) -> bool:
        """Whether there is nothing to copy: no tensor, or one that the contract allows on the host and is there."""
        tensors = tensors_of(value)
        return not tensors or (name in self.op.rules.host and all(t.device.type == "cpu" for t in tensors))

    def _fetch(self, name: str, value: Any) -> Any:
        return value if self._stays(name, value) else map_tensors(value, self.runtime.to_host)

    def _fetch_part(self, value: Any, touch: Touch, seen: SimpleNamespace) -> Any:
        """An argument of the same geometry on the host, of which only what is touched is filled.

        Memory that is not written to is not committed by the system, so a pool larger than the host's memory is no
        problem, and indices keep their meaning.
        """
        image = map_tensors(value, _empty_like)
        found = runs(touch.at, seen, num_units(value, touch))
        copies = [self.runtime.to_host_later(part) for part in views(value, touch, found)]  # all on their way at once
        for mine, copy in zip(views(image, touch, found), copies, strict=True):
            mine.copy_(copy.wait())
        return image

    def _write_back(self, value: Any, image: Any, touch: Touch | None, seen: SimpleNamespace) -> None:
        if touch is None:
            pairs = zip(tensors_of(value), tensors_of(image), strict=True)
        else:
            found = runs(touch.at if touch.written is None else touch.written, seen, num_units(value, touch))
            pairs = zip(views(value, touch, found), views(image, touch, found), strict=True)
        for theirs, mine in pairs:
            self.runtime.write(theirs, mine)


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
