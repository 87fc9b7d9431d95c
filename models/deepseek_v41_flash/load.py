"""Loading: configuration, checkpoint and tokenizer are checked whole before the first weight takes memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.models.checkpoint import Checkpoint
from deepinfer.models.config_file import CONFIG_FILE
from deepinfer.models.deepseek_v41_flash.config import ModelConfig
from deepinfer.models.deepseek_v41_flash.engram_tables import EngramConstants
from deepinfer.models.deepseek_v41_flash.linear import Numerics
from deepinfer.models.deepseek_v41_flash.model import DeepseekV41Flash
from deepinfer.models.deepseek_v41_flash.vocabulary import vocabulary_problems
from deepinfer.models.deepseek_v41_flash.weights import load_weights
from deepinfer.models.errors import ConfigError
from deepinfer.models.interface import Vocabulary
from deepinfer.ops.registry import OpTable

if TYPE_CHECKING:
    from deepinfer.models.registry import LoadOptions


def load(path: Path, ops: OpTable, options: LoadOptions, vocabulary: Vocabulary) -> DeepseekV41Flash:
    """Load a DeepSeek-V4.1-Flash checkpoint.

    Raises:
        ConfigError: the configuration, or the tokenizer beside it, cannot be run.
        CheckpointError: files or tensors are absent, damaged or of the wrong shape; all are listed.
    """
    config = ModelConfig.from_dir(path)
    problems = vocabulary_problems(config, vocabulary)
    if problems:
        raise ConfigError(f"{path}: tokenizer and {CONFIG_FILE}", problems)
    checkpoint = Checkpoint.open(path)
    constants = EngramConstants.build(config.text, vocabulary) if config.text.engram_layer_ids else None
    weights = load_weights(
        checkpoint,
        config,
        dtype=options.dtype,
        draft=options.draft and config.text.has_draft,
        vision=options.vision and config.vision is not None,
        engram=options.engram,
        progress=options.progress,
    )
    numerics = Numerics(options.dtype, options.activation_rounding, options.kv_rounding)
    model = DeepseekV41Flash(
        config,
        weights,
        ops,
        numerics,
        max_model_len=options.max_model_len or config.text.max_position_embeddings,
        engram=constants,
    )
    model.info = replace(model.info, fingerprint=checkpoint.fingerprint())
    return model
