"""deepinfer: DeepSeek-V4.1-Flash on whatever accelerator you have.

The public names are resolved on first use, so that `import deepinfer` costs nothing and the command line can print its
help without loading torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.core.config import EngineConfig
    from deepinfer.core.environment import ConfigWarning
    from deepinfer.core.errors import ConfigError, DeepInferError, OutOfBlocksError, RequestError
    from deepinfer.core.grammar.spec import StructuralTag, StructuredOutput, Tag, ToolCalls
    from deepinfer.core.outputs import CompletionOutput, Logprob, RequestOutput, RequestTimings
    from deepinfer.core.sampling_params import SamplingParams
    from deepinfer.entrypoints.async_llm import AsyncLLM
    from deepinfer.entrypoints.engine_thread import EngineDeadError
    from deepinfer.entrypoints.llm import LLM
    from deepinfer.entrypoints.prompts import ChatMessage, ChatOutput, ToolCall
    from deepinfer.entrypoints.session import SessionClosedError
    from deepinfer.entrypoints.stream_output import StreamOutput

    __version__: str

__all__ = [
    "LLM",
    "AsyncLLM",
    "ChatMessage",
    "ChatOutput",
    "CompletionOutput",
    "ConfigError",
    "ConfigWarning",
    "DeepInferError",
    "EngineConfig",
    "EngineDeadError",
    "Logprob",
    "OutOfBlocksError",
    "RequestError",
    "RequestOutput",
    "RequestTimings",
    "SamplingParams",
    "SessionClosedError",
    "StreamOutput",
    "StructuralTag",
    "StructuredOutput",
    "Tag",
    "ToolCall",
    "ToolCalls",
    "__version__",
]

_HOMES = {
    "deepinfer.core.config": ("EngineConfig",),
    "deepinfer.core.environment": ("ConfigWarning",),
    "deepinfer.core.errors": ("ConfigError", "DeepInferError", "OutOfBlocksError", "RequestError"),
    "deepinfer.core.grammar.spec": ("StructuralTag", "StructuredOutput", "Tag", "ToolCalls"),
    "deepinfer.core.outputs": ("CompletionOutput", "Logprob", "RequestOutput", "RequestTimings"),
    "deepinfer.core.sampling_params": ("SamplingParams",),
    "deepinfer.entrypoints.async_llm": ("AsyncLLM",),
    "deepinfer.entrypoints.engine_thread": ("EngineDeadError",),
    "deepinfer.entrypoints.llm": ("LLM",),
    "deepinfer.entrypoints.prompts": ("ChatMessage", "ChatOutput", "ToolCall"),
    "deepinfer.entrypoints.session": ("SessionClosedError",),
    "deepinfer.entrypoints.stream_output": ("StreamOutput",),
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
