"""The weights of a training run, by the names of the checkpoint.

Routed experts are one parameter per matrix, [E, N, K]; everything else is a parameter per tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from deepinfer.models.checkpoint import TensorSpec
from deepinfer.models.deepseek_v41_flash.config import ModelConfig
from deepinfer.models.deepseek_v41_flash.tensors import expected_tensors
from tools.train_tiny.rounding import Storage, changes_by_storing

_EXPERT = re.compile(r"(.*\.ffn\.experts)\.(\d+)\.(w[123])\.weight")
_LEARNED_BY_RULE = ("gate.bias", "gate.bias_vl")
"""Moved by the load of their experts, not by a gradient."""


class WeightStore(nn.Module):
    """All tensors of a checkpoint as float32 parameters.

    Args:
        config: of the model.
        seed: of the initial values.
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        specs = expected_tensors(config)
        self.storage: dict[str, Storage] = {}
        generator = torch.Generator().manual_seed(seed)
        depth = config.text.num_layers + config.text.num_nextn_predict_layers
        for name, shape, storage in _parameters(specs):
            self.storage[name] = storage
            value = _initial(name, shape, config.text.hc_mult, depth, generator)
            grows = not name.endswith(_LEARNED_BY_RULE)
            self.register_parameter(_key(name), nn.Parameter(value, requires_grad=grows))

    def raw(self, name: str) -> nn.Parameter:
        """The parameter itself."""
        return self.get_parameter(_key(name))

    def changes(self) -> dict[str, Tensor]:
        """What storing changes of each weight, by name, without gradient."""
        return changes_by_storing({name: self.raw(name).detach() for name in self.storage}, self.storage)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by their names in the checkpoint."""
        return ((name, self.raw(name)) for name in self.storage)

    def tensor_of(self, name: str) -> Tensor:
        """The float32 value of one tensor of the checkpoint, experts one by one."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return self.raw(name).detach()
        return self.raw(f"{match[1]}.{match[3]}.weight").detach()[int(match[2])]


def _key(name: str) -> str:
    return name.replace(".", "/")  # a module takes no dots in the names of its parameters


def _parameters(specs: Mapping[str, TensorSpec]) -> Iterator[tuple[str, tuple[int, ...], Storage]]:
    experts: dict[str, int] = {}
    for name in specs:
        match = _EXPERT.fullmatch(name)
        if match is not None:
            stacked = f"{match[1]}.{match[3]}.weight"
            experts[stacked] = max(experts.get(stacked, 0), int(match[2]) + 1)
    seen: set[str] = set()
    for name, spec in specs.items():
        if name.endswith(".scale"):
            continue
        match = _EXPERT.fullmatch(name)
        if match is None:
            yield name, spec.shape, _storage(spec, specs.get(f"{name.removesuffix('.weight')}.scale"))
            continue
        stacked = f"{match[1]}.{match[3]}.weight"
        if stacked not in seen:
            seen.add(stacked)
            rows, columns = spec.shape
            yield stacked, (experts[stacked], rows, columns * 2), "fp4"


def _storage(spec: TensorSpec, scale: TensorSpec | None) -> Storage:
    if scale is None:
        return "f32" if spec.dtypes[0] == "F32" else "bf16"
    return "fp8_rows" if scale.shape[0] == spec.shape[0] else "fp8_blocks"


def _initial(name: str, shape: tuple[int, ...], streams: int, depth: int, generator: torch.Generator) -> Tensor:
    if "norm" in name or name.endswith(("q_weight", "k_weight")):
        return torch.ones(shape)
    if name.endswith(("attn_sink", "gate.bias", "gate.bias_vl", "confidence_head.proj.weight")):
        return torch.zeros(shape)
    if name.endswith(("hc_attn_scale", "hc_ffn_scale")):
        return torch.full(shape, 0.1)
    if name.endswith(("hc_attn_base", "hc_ffn_base")):
        return _mixing_base(name, streams)
    spread = 1.0 if name.endswith(("embed.weight", "markov_head.head.weight")) else shape[-1] ** -0.5
    if name.endswith("markov_head.head.weight"):
        spread = 0.02
    elif ".engram.embed" in name:
        spread = 0.3
    elif name.endswith(("attn.wo_b.weight", ".w2.weight")):
        spread *= (2 * depth) ** -0.5
    return torch.randn(shape, generator=generator) * spread


def _mixing_base(name: str, streams: int) -> Tensor:
    """Read mostly one stream, another one in each sublayer; write to all alike; leave the streams as they are."""
    number = int(next(part for part in name.split(".") if part.isdigit()))
    favourite = (2 * number + ("ffn" in name)) % streams
    read = torch.full((streams,), math.log(0.12 / 0.88))
    read[favourite] = math.log(0.7 / 0.3)
    return torch.cat((read, torch.zeros(streams), 4 * torch.eye(streams).flatten()))
