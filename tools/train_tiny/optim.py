"""The optimiser: Muon for matrices between activations, AdamW for the rest, and the experts' biases by rule.

Source: Muon is the momentum update made orthogonal by Newton-Schulz iterations (Jordan et al., 2024); the bias rule is
auxiliary-loss-free balancing (arXiv:2408.15664).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tools.train_tiny.store import WeightStore

_OTHERS = ("embed.weight", "head.weight", "_fn", ".gate.weight", "proj.weight", "q_weight", "k_weight")
"""Ends of the names of matrices that AdamW trains: tables, and what makes few numbers of many."""
_TABLES = ("embed.weight",)
_MOMENTUM = 0.95
_DECAY = 0.02
_BIAS_STEP = 1e-3
_LARGEST_NORM = 1.0


class Optimizer:
    """One step of everything.

    Args:
        store: the weights.
        matrix_lr: full rate of Muon.
        other_lr: full rate of AdamW.
        table_lr: full rate of AdamW for tables of rows, of which a step sees few.
    """

    def __init__(self, store: WeightStore, matrix_lr: float, other_lr: float, table_lr: float) -> None:
        self._store = store
        self._matrix_lr = matrix_lr
        trained = [(name, p) for name, p in store.named() if p.requires_grad]
        self._matrices: dict[tuple[int, ...], list[tuple[str, nn.Parameter]]] = defaultdict(list)
        others, tables = [], []
        for name, p in trained:
            if p.dim() < 2 or (name.endswith(_OTHERS) and not name.endswith("main_proj.weight")):
                (tables if name.endswith(_TABLES) else others).append(p)
            else:
                self._matrices[tuple(p.shape)].append((name, p))
        self._momenta = {
            shape: torch.zeros(len(group), *shape, device=group[0][1].device) for shape, group in self._matrices.items()
        }
        self._others = [*others, *tables]
        self._full_rates = (other_lr, table_lr)
        # On a device the rates are tensors, so that a captured step follows them.
        device = others[0].device
        self._on_device = device.type != "cpu"
        self._rate = torch.ones((), device=device)
        groups = [
            {"params": params, "lr": torch.tensor(lr, device=device) if self._on_device else lr}
            for params, lr in ((others, other_lr), (tables, table_lr))
        ]
        self._adam = torch.optim.AdamW(
            groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, capturable=self._on_device
        )

    def set_rate(self, rate: float) -> None:
        """Take `rate` of the full rates from the next step on."""
        self._rate.fill_(rate)
        for settings, full in zip(self._adam.param_groups, self._full_rates, strict=True):
            if self._on_device:
                settings["lr"].fill_(full * rate)
            else:
                settings["lr"] = full * rate

    def step(self, loads: Mapping[str, Tensor]) -> None:
        """Move weights along their gradients, which are cleared, and biases by the loads of experts.

        Args:
            loads: by layer name, [E] share of choices.
        """
        torch.nn.utils.clip_grad_norm_(self._others, _LARGEST_NORM)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        for shape, group in self._matrices.items():
            self._muon(shape, group)
        self._balance(loads)

    def state(self) -> dict[str, Any]:
        """What a resume needs."""
        return {"adam": self._adam.state_dict(), "momenta": self._momenta}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self._adam.load_state_dict(state["adam"])
        for shape, momentum in self._momenta.items():
            momentum.copy_(state["momenta"][shape])

    @torch.no_grad()
    def _muon(self, shape: tuple[int, ...], group: list[tuple[str, nn.Parameter]]) -> None:
        grads = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for _, p in group])
        momentum = self._momenta[shape].mul_(_MOMENTUM).add_(grads)
        rate = self._matrix_lr * self._rate
        updates = orthogonal(grads.add(momentum, alpha=_MOMENTUM)) * (rate * max(1.0, shape[-2] / shape[-1]) ** 0.5)
        for (_, p), update in zip(group, updates, strict=True):
            if p.grad is not None:  # what a phase does not train stays as it is
                p.mul_(1 - rate * _DECAY).sub_(update)
                p.grad = None

    @torch.no_grad()
    def _balance(self, loads: Mapping[str, Tensor]) -> None:
        for layer, load in loads.items():
            bias = self._store.raw(f"{layer}.ffn.gate.bias")
            bias.add_(torch.sign(load.mean() - load), alpha=_BIAS_STEP)
            self._store.raw(f"{layer}.ffn.gate.bias_vl").copy_(bias)


def orthogonal(x: Tensor, iterations: int = 5) -> Tensor:
    """Nearest orthogonal matrices of [..., N, K], roughly: singular values come near 1."""
    tall = x.shape[-2] > x.shape[-1]
    y = x if x.device.type == "cpu" else x.bfloat16()
    y = y.mT if tall else y
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        square = y @ y.mT
        y = 3.4445 * y + (-4.7750 * square + 2.0315 * square @ square) @ y
    even: Tensor = y.mT if tall else y
    return even.to(x.dtype)
