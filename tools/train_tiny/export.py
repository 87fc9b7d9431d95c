"""From trained weights to a checkpoint folder in the released storage formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from deepinfer.core.tokenizer import TOKENIZER_FILE
from deepinfer.models.checkpoint import SINGLE_FILE
from deepinfer.models.config_file import CONFIG_FILE
from deepinfer.models.deepseek_v41_flash.tensors import expected_tensors
from deepinfer.ops.quant import quantize
from tools.train_tiny.rounding import quantize_blocks
from tools.train_tiny.store import WeightStore


def export(store: WeightStore, config: dict[str, Any], tokenizer: str, folder: Path) -> int:
    """Write weights, configuration and tokenizer.

    Args:
        store: the weights.
        config: of `config.json`.
        tokenizer: text of `tokenizer.json`.
        folder: created; files of an older export are replaced.

    Returns:
        Bytes of the weight file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Last goes the configuration, so that an interrupted export is not taken for a checkpoint.
    (folder / CONFIG_FILE).unlink(missing_ok=True)
    data = save(stored_tensors(store), metadata={"format": "pt"})
    (folder / SINGLE_FILE).write_bytes(data)
    (folder / TOKENIZER_FILE).write_text(tokenizer, encoding="utf-8")
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return len(data)


@torch.no_grad()
def stored_tensors(store: WeightStore) -> dict[str, Tensor]:
    """All tensors of the checkpoint by name, codes and scales, on the CPU."""
    specs = expected_tensors(store.config)
    tensors: dict[str, Tensor] = {}
    for name, spec in specs.items():
        if name in tensors:
            continue  # a scale, made with its weight
        value = store.tensor_of(name).cpu()
        scale_name = f"{name.removesuffix('.weight')}.scale"
        if scale_name not in specs:
            tensors[name] = value.clone() if spec.dtypes[0] == "F32" else value.bfloat16()
            continue
        if spec.dtypes[0] == "I8":
            packed = quantize(value, "mxfp4")
            codes, exponents = packed.data.view(torch.int8), packed.scale
        elif specs[scale_name].shape[0] == spec.shape[0]:  # a scale per row
            packed = quantize(value, "mxfp8")
            codes, exponents = packed.data.view(torch.float8_e4m3fn), packed.scale
        else:
            codes, exponents = quantize_blocks(value)
        tensors[name] = codes.contiguous()
        tensors[scale_name] = exponents.view(torch.float8_e8m0fnu).contiguous()
    return tensors
