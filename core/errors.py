"""The engine's errors: one class per remedy, each message saying what was asked and what was there.

Errors of ops and backends live in `deepinfer.ops`; these are what the engine and its people's side raise.
"""


class DeepInferError(Exception):
    """Base of every error the engine raises on purpose."""


class ConfigError(DeepInferError):
    """A setting is out of range or contradicts another. Remedy: change the configuration."""


class OutOfBlocksError(DeepInferError):
    """No free block, window page or sequence slot for what was asked. Remedy: preempt a sequence and retry."""


class KVTransferError(DeepInferError):
    """KV records cannot be exported, or a bundle not imported here. Remedy: compute the prefix again."""


class RequestError(DeepInferError):
    """One request cannot be served. It becomes that request's error object; other requests go on.

    Attributes:
        code: stable, machine-readable name of the fault, such as `"prompt_too_long"`.
        message: what was wrong, where, and what would be right.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type["RequestError"], tuple[str, str]]:
        """Pickle by the two arguments: results cross process boundaries."""
        return type(self), (self.code, self.message)


def as_request_error(code: str, error: Exception) -> RequestError:
    """What a plug-in or a user's function raised, as the error of the request that it belongs to."""
    return error if isinstance(error, RequestError) else RequestError(code, f"{type(error).__name__}: {error}")
