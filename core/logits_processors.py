"""Logits processors: code of users' own, found by entry point and asked for by name.

An installed package names a factory in the group `deepinfer.logits_processors`; a request asks for it with
`SamplingParams(logits_processors={"name": argument})`. The factory is called once per answer and gives either

- a `RowShaper` (`core.shaping`): masks, biases and forced tokens from the tokens alone. It costs no copy of logits; or
- a function of (output ids, logits [vocab] float32 on the host) that gives other logits. Its step waits for them.

Either must depend on the tokens alone and on nothing it did before: under speculation it is asked about tokens that may
not be kept, and after preemption it is asked again.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from deepinfer.core.errors import RequestError
from deepinfer.core.shaping import Float32Array, RowShaper
from deepinfer.ops.show import shown

GROUP: Final = "deepinfer.logits_processors"

RowProcessor = Callable[[list[int], Float32Array], Float32Array]
"""Called with the ids of the answer so far and the logits behind them; gives the logits to use."""

ProcessorFactory = Callable[[Any, list[int], int], RowShaper | RowProcessor]
"""Called with the request's argument, the prompt's ids and the vocabulary's size. It may raise `RequestError`."""


def find_processor(name: str) -> ProcessorFactory:
    """The factory of an installed processor.

    Raises:
        RequestError: none has this name, or it cannot be imported.
    """
    installed = _installed()
    found = installed.get(name)
    if found is None:
        names = ", ".join(sorted(installed)) or "none"
        raise RequestError(
            "unknown_logits_processor",
            f"logits_processors: {shown(name)} is not installed (entry points of {GROUP}: {names})",
        )
    try:
        factory: ProcessorFactory = found.load()
    except Exception as error:  # a plug-in may fail in any way; the request fails, not the engine
        raise RequestError(
            "logits_processor_failed", f"logits_processors: {name!r} cannot be imported: {error!r}"
        ) from error
    return factory


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
