"""From settings to an engine: choose the backend, load the model, bind its ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from deepinfer.core.config import EngineConfig, EngineSettings
from deepinfer.core.engine import Engine
from deepinfer.core.errors import ConfigError
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.entrypoints.chat_formats import chat_format
from deepinfer.entrypoints.chat_protocol import ChatFormat
from deepinfer.models.interface import Model
from deepinfer.models.registry import LoadOptions, load_model
from deepinfer.ops.backend import BindContext, Implementation
from deepinfer.ops.proof import Gate, proof_level
from deepinfer.ops.registry import OpTable, find_backend, parse_overrides
from deepinfer.ops.runtime import Runtime


class DraftBinder(Protocol):
    """Something that gives a model another draft."""

    def bind(self, model: Model) -> Model:
        """The model with this draft, to be given to the engine in its place."""
        ...


class _ProofGate:
    """Lets proven kernels pass at once; the others have to pass their own cases on this device first.

    The suite that runs those cases is imported only when there is something to verify.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._gate: Gate | None = None

    def __call__(self, implementation: Implementation) -> bool:
        if proof_level(implementation) == "hardware":
            return True
        if self._gate is None:
            from deepinfer.conformance.selfcheck import gate_for

            self._gate = gate_for(self._runtime)
        return self._gate(implementation)


def merge_config(folder: str, config: str | Path | EngineConfig | None, settings: EngineSettings) -> EngineConfig:
    """Settings from all sources; an `EngineConfig` stands for file and environment.

    Raises:
        ConfigError: every setting that cannot be used.
    """
    if not isinstance(config, EngineConfig):
        return EngineConfig.load(folder, config=config, **settings)
    changes: dict[str, Any] = {**settings, **({"model": folder} if folder else {})}
    unknown = sorted(changes.keys() - {f.name for f in fields(config)})
    if unknown:
        raise ConfigError(f"unknown setting(s): {', '.join(unknown)}")
    return replace(config, **changes)


def open_engine(
    model: str | Path | Model,
    tokenizer: str | Path | Tokenizer | None,
    draft: DraftBinder | None,
    config: str | Path | EngineConfig | None,
    on_load: Callable[[int, int], None] | None,
    settings: EngineSettings,
) -> tuple[Engine, Tokenizer | None, ChatFormat | None]:
    """What `LLM` is made of, from the arguments that it documents.

    Returns:
        As `build_engine`.

    Raises:
        Exception: as `merge_config` and `build_engine`.
    """
    folder = str(model) if isinstance(model, str | Path) else ""
    if draft is not None:
        settings.setdefault("speculation", "coupled")
    settled = merge_config(folder, config, settings)
    if not isinstance(tokenizer, Tokenizer | None):
        tokenizer = Tokenizer.from_dir(tokenizer)
    return build_engine(None if isinstance(model, str | Path) else model, settled, tokenizer, on_load, draft)


def build_engine(
    model: Model | None,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    on_load: Callable[[int, int], None] | None,
    draft: DraftBinder | None = None,
) -> tuple[Engine, Tokenizer | None, ChatFormat | None]:
    """The engine of a model object, or of the checkpoint that `config` names.

    Args:
        model: None to load a checkpoint.
        config: validated settings.
        tokenizer: used in place of the checkpoint's.
        on_load: called with (tensors done, tensors in all) while weights load.
        draft: takes the place of the model's own draft.

    Returns:
        The engine, its tokenizer and its chat format, None where there is none.

    Raises:
        ConfigError: no such folder, or settings that backend and model together cannot use.
        BackendUnavailableError: the backend is not installed or cannot run here.
        ValueError: the checkpoint cannot be used; every fault is named before memory is taken.
    """
    if model is None and not Path(config.model).is_dir():
        raise ConfigError(f"model: {config.model!r} is no folder; name one that holds a checkpoint")
    backend = find_backend(config.backend)
    if backend.runtime is None:
        raise ConfigError(f"backend {backend.name!r} has no runtime, so no engine can run on it")
    runtime = backend.runtime()
    context = BindContext(runtime.device, runtime, config.batch_invariant, config.max_num_batched_tokens)
    gate = _ProofGate(runtime) if config.verify_kernels else None
    ops = OpTable(backend, context, config.strict, parse_overrides(config.ops), gate)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)  # torch has one pool per process, so the last engine decides
    if model is None:
        tokenizer = tokenizer or Tokenizer.from_dir(config.model)
        options = LoadOptions(
            dtype=getattr(torch, config.dtype),
            max_model_len=config.max_model_len,
            kv_rounding=config.kv_rounding,
            activation_rounding=config.rounds_activations,
            draft=config.load_draft or (config.speculation != "off" and draft is None),
            vision=config.load_vision,
            engram=config.engram,
            progress=on_load,
        )
        model = load_model(config.model, ops, options, tokenizer)
    if draft is not None:
        model = draft.bind(model)
    chat = chat_format(model.info.name)
    tool_grammar = chat.tool_grammar if chat is not None else None
    return Engine(model, config, ops, tokenizer, tool_grammar=tool_grammar), tokenizer, chat
