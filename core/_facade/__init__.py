"""deepinfer: DeepSeek-V4.1-Flash on whatever accelerator you have.

The public names are resolved on first use, so that `import deepinfer` costs nothing and the command line can print its
help without loading torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.core.config import ConfigWarning, EngineConfig
    from deepinfer.core.errors import ConfigError, DeepInferError, OutOfBlocksError, RequestError
    from deepinfer.core.outputs import CompletionOutput, Logprob, RequestOutput, RequestTimings
    from deepinfer.core.sampling_params import SamplingParams
    from deepinfer.entrypoints.llm import LLM, StreamOutput
    from deepinfer.entrypoints.prompts import ChatMessage, ChatOutput, ToolCall

    __version__: str

__all__ = [
    "LLM",
    "ChatMessage",
    "ChatOutput",
    "CompletionOutput",
    "ConfigError",
    "ConfigWarning",
    "DeepInferError",
    "EngineConfig",
    "Logprob",
    "OutOfBlocksError",
    "RequestError",
    "RequestOutput",
    "RequestTimings",
    "SamplingParams",
    "StreamOutput",
    "ToolCall",
    "__version__",
]

_HOMES = {
    "deepinfer.core.config": ("ConfigWarning", "EngineConfig"),
    "deepinfer.core.errors": ("ConfigError", "DeepInferError", "OutOfBlocksError", "RequestError"),
    "deepinfer.core.outputs": ("CompletionOutput", "Logprob", "RequestOutput", "RequestTimings"),
    "deepinfer.core.sampling_params": ("SamplingParams",),
    "deepinfer.entrypoints.llm": ("LLM", "StreamOutput"),
    "deepinfer.entrypoints.prompts": ("ChatMessage", "ChatOutput", "ToolCall"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = _version()
    elif name in _HOME_OF:
        value = getattr(import_module(_HOME_OF[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("deepinfer")
    except PackageNotFoundError:
        return "0+source"  # run from a tree that is not installed
