"""A model of real dimensions with few layers and random weights, made on the device: nothing on disk, nothing moved.

Layers are chosen from the configuration's own, so that every kind is there: window only, KV sources of both ratios,
layers that choose anew and layers that reuse. Engram layers are left out: their tables need a tokenizer and are most of
a checkpoint. Weights have the released storage formats and a spread that keeps activations near 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor

from deepinfer.models.checkpoint import Checkpoint, TensorSpec
from deepinfer.models.deepseek_v41_flash.config import ModelConfig
from deepinfer.models.deepseek_v41_flash.linear import Numerics
from deepinfer.models.deepseek_v41_flash.model import DeepseekV41Flash
from deepinfer.models.deepseek_v41_flash.tensors import expected_tensors
from deepinfer.models.deepseek_v41_flash.weights import load_weights
from deepinfer.ops.registry import OpTable
from deepinfer.ops.runtime import Runtime

RELEASED: Final = Path(__file__).parents[1] / "tests" / "models" / "data" / "real_config.json"
MIN_LAYERS: Final = 3
_CODE_SPREAD: Final = {"F8_E4M3": 102.0, "I8": 2.9}
"""Root mean square of random codes."""


def choose_layers(text: Mapping[str, Any], count: int) -> list[int]:
    """`count` layers in order, one of each kind first; what a layer reads is always kept.

    Args:
        text: `text_config` of a checkpoint.
        count: at least `MIN_LAYERS`, at most as many as there are.

    Raises:
        ValueError: `count` is out of range.
    """
    total, sources = text["num_hidden_layers"], text["kv_source_layer_ids"]
    if not MIN_LAYERS <= count <= total:
        raise ValueError(f"a model of {total} layers is cut to {MIN_LAYERS} to {total} of them, not {count}")
    ratios, decoder = text["compress_ratios"][:total], text["candidate_source_layer_id"]
    first = next((layer for layer in sources if layer < decoder), decoder)
    chooses = [layer for layer in text["index_source_layer_ids"] if layer > decoder]
    reuses = [layer for layer in range(total) if ratios[layer] and layer not in text["index_source_layer_ids"]]
    wanted = [
        ratios.index(0),
        first,
        decoder,
        *[layer for layer in reuses if layer > decoder][:1],
        *[layer for layer in reuses if first < layer < decoder][:1],
        *chooses[:1],
        *[layer for layer in range(first + 1, total)],
        *range(total),
    ]
    return sorted(list(dict.fromkeys(wanted))[:count])


def cut_config(data: Mapping[str, Any], count: int) -> ModelConfig:
    """The configuration of those layers.

    Args:
        data: content of `config.json`.
        count: layers of the backbone.
    """
    text = data["text_config"]
    layers = choose_layers(text, count)

    def places(name: str) -> list[int]:
        return [layers.index(layer) for layer in text[name] if layer in layers]

    total = text["num_hidden_layers"]
    num_targets = len(text["dspark_target_layer_ids"])
    changed = {
        "num_hidden_layers": count,
        "compress_ratios": [text["compress_ratios"][layer] for layer in layers] + text["compress_ratios"][total:],
        "kv_source_layer_ids": places("kv_source_layer_ids"),
        "index_source_layer_ids": places("index_source_layer_ids"),
        "candidate_source_layer_id": layers.index(text["candidate_source_layer_id"]),
        "dspark_target_layer_ids": list(range(count - num_targets, count)),
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
    }
    return ModelConfig.from_dict({**data, "text_config": {**text, **changed}})


class RandomCheckpoint:
    """What `load_weights` asks of a checkpoint, with tensors made when they are read.

    Args:
        config: of the model.
        device: where tensors are made.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.tensors = expected_tensors(config)
        self._device = device
        self._gen = torch.Generator(device).manual_seed(0)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def validate(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is missing."""

    def release(self) -> None:
        """Nothing is held."""

    def get(self, name: str) -> Tensor:
        """A tensor in its stored type."""
        spec = self.tensors[name]
        kind = spec.dtypes[0]
        if kind == "F8_E8M0":
            return self._scales(name, spec)
        if kind in _CODE_SPREAD:
            codes = self._bytes(0, 256, spec.shape)
            if kind == "F8_E4M3":
                codes.masked_fill_((codes & 0x7F) == 0x7F, 0)  # NaN
                return codes.view(torch.float8_e4m3fn)
            return codes.view(torch.int8)
        if "norm" in name or name.endswith("_scale"):
            values = torch.rand(spec.shape, generator=self._gen, device=self._device) + 0.5
        else:
            values = torch.randn(spec.shape, generator=self._gen, device=self._device)
            values *= 1.0 if name == "embed.weight" else spec.shape[-1] ** -0.5
        return values if kind == "F32" else values.bfloat16()

    def _scales(self, name: str, spec: TensorSpec) -> Tensor:
        kind = self.tensors[f"{name.removesuffix('.scale')}.weight"].dtypes[0]
        columns = 32 * spec.shape[-1]
        exponent = 127 - round(math.log2(_CODE_SPREAD[kind] * columns**0.5))
        return self._bytes(exponent - 1, exponent + 2, spec.shape)

    def _bytes(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, generator=self._gen, device=self._device, dtype=torch.uint8)


@contextmanager
def _weights_stay(runtime: Runtime) -> Iterator[None]:
    """Let `to_device` take what is on the device already, as a model's weights are here."""
    to_device = runtime.to_device

    def take(tensor: Tensor) -> Tensor:
        return tensor if tensor.device == runtime.device else to_device(tensor)

    setattr(runtime, "to_device", take)  # noqa: B010
    try:
        yield
    finally:
        delattr(runtime, "to_device")


def build(config: ModelConfig, ops: OpTable, *, draft: bool, max_model_len: int) -> DeepseekV41Flash:
    """A model as it is served: bfloat16, activations and caches rounded.

    Args:
        config: with the layers that are wanted.
        ops: of the device; what is bound here is bound for its engine.
        draft: with draft blocks.
        max_model_len: positions that rotary tables cover.
    """
    runtime = ops.context.runtime
    device = runtime.device if runtime.capabilities.torch_compute else torch.device("cpu")
    checkpoint = cast(Checkpoint, RandomCheckpoint(config, device))
    weights = load_weights(checkpoint, config, device=device, dtype=torch.bfloat16, draft=draft, vision=False)
    with _weights_stay(runtime):
        numerics = Numerics(torch.bfloat16, activation_rounding=True, kv_rounding=True)
        return DeepseekV41Flash(config, weights, ops, numerics, max_model_len=max_model_len, engram=None)


def read_config(path: Path) -> dict[str, Any]:
    """Content of a `config.json`."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data
