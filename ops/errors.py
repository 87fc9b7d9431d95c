"""Errors of the op layer, one class per remedy."""

from __future__ import annotations

from collections.abc import Sequence


class OpError(Exception):
    """Base of every error that the op layer raises on purpose."""


class OpArgumentError(OpError, ValueError):
    """The caller passed an argument that the contract forbids; fix the caller."""


class BackendUnavailableError(OpError):
    """A backend was named that is not installed, or that its probe refuses; install what is absent."""


class MissingOpsError(OpError):
    """Under `strict`, a backend lacks ops; the message names every one of them."""

    def __init__(self, backend: str, missing: Sequence[str]) -> None:
        self.backend = backend
        self.missing = tuple(missing)
        super().__init__(
            f"backend {backend!r} has no implementation of {len(self.missing)} op(s): {', '.join(self.missing)}. "
            "Implement them, or run without strict=True to use the reference for them."
        )
