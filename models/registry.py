"""From a checkpoint folder to a model that is bound to its ops, with its tokenizer and chat format.

The architecture named in `config.json` picks the package; a second model adds a line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from deepinfer.models.config_file import CONFIG_FILE, read_config
from deepinfer.models.errors import ConfigError
from deepinfer.models.interface import Model, Vocabulary
from deepinfer.ops.registry import OpTable
from deepinfer.ops.show import shown


@dataclass(frozen=True)
class LoadOptions:
    """How to load a model; the engine's configuration in the words of `models/`.

    Attributes:
        dtype: activations, bfloat16 or float32.
        max_model_len: positions to prepare for; None for the model's own limit.
        kv_rounding: store caches in their quantised records.
        activation_rounding: quantise inputs of products with quantised weights.
        draft: load the draft blocks.
        vision: load the vision tower.
        engram: keep Engram tables in memory, or mapped from disk.
        progress: called with (tensors done, tensors in all) while weights load.
    """

    dtype: torch.dtype = torch.bfloat16
    max_model_len: int | None = None
    kv_rounding: bool = True
    activation_rounding: bool = True
    draft: bool = False
    vision: bool = False
    engram: Literal["memory", "mmap"] = "memory"
    progress: Callable[[int, int], None] | None = None


Loader = Callable[[Path, OpTable, LoadOptions, Vocabulary], Model]


def _load_v41(path: Path, ops: OpTable, options: LoadOptions, vocabulary: Vocabulary) -> Model:
    from deepinfer.models.deepseek_v41_flash.load import load

    return load(path, ops, options, vocabulary)


_LOADERS: dict[str, Loader] = {"DeepseekV41ForCausalLM": _load_v41}


def load_model(path: str | Path, ops: OpTable, options: LoadOptions, vocabulary: Vocabulary) -> Model:
    """Load the checkpoint in `path`.

    Args:
        path: a checkpoint folder.
        ops: resolves the model's ops, and says on which device.
        options: how to load.
        vocabulary: the checkpoint's tokenizer; Engram hashes depend on its spellings.

    Raises:
        ConfigError: `config.json` is absent or broken, or names an architecture that is not here.
        CheckpointError: weights are absent, damaged or not those of the configuration.
    """
    folder = Path(path)
    names = read_config(folder).get("architectures")
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and name in _LOADERS:
            return _LOADERS[name](folder, ops, options, vocabulary)
    known = ", ".join(sorted(_LOADERS))
    raise ConfigError(
        str(folder / CONFIG_FILE),
        [f"architectures: is {shown(names)}; it must be a list with one of those that run here: {known}"],
    )
