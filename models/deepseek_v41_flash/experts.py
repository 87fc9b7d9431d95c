"""The mixture of experts of one layer: router, routed experts through dispatch and combine, shared expert."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.models.deepseek_v41_flash.linear import Linear, Numerics, Rows, place, place_weight
from deepinfer.models.deepseek_v41_flash.step import RowContext
from deepinfer.models.deepseek_v41_flash.weights import MoEWeights
from deepinfer.ops.formats import QTensor, QuantFormat
from deepinfer.ops.moe import ep_combine, ep_dispatch, moe_gate, moe_grouped_gemm, swiglu_quant
from deepinfer.ops.registry import OpTable


class Experts:
    """Routed and shared experts; on one rank dispatch is a permutation, and the path is the same."""

    def __init__(
        self,
        ops: OpTable,
        name: str,
        weights: MoEWeights,
        numerics: Numerics,
        *,
        per_token: int,
        scale: float,
        limit: float,
    ) -> None:
        self.name = name
        self.per_token, self.scale, self.limit = per_token, scale, limit
        self.num_experts = weights.gate.shape[0]
        self.width = weights.w13.shape[-2] // 2
        self._dtype = numerics.dtype
        self._router = Linear(ops, weights.gate, numerics, out_dtype=torch.float32)
        self._bias = place(ops, weights.bias.float())
        self._shared13 = Linear(ops, weights.shared_w13, numerics)
        self._shared2 = Linear(ops, weights.shared_w2, numerics)
        rounding = numerics.activation_rounding
        self._fmt: QuantFormat | None = "mxfp8" if rounding and isinstance(weights.w2, QTensor) else None
        self._shared_fmt: QuantFormat | None = "mxfp8" if rounding and isinstance(weights.shared_w2, QTensor) else None
        self._gate = ops.bind(moe_gate, experts=self.num_experts, k=per_token)
        self._dispatch = ops.bind(ep_dispatch, experts=self.num_experts, k=per_token)
        self._combine = ops.bind(ep_combine, k=per_token)
        self._swiglu = ops.bind(swiglu_quant, width=self.width, fmt=self._fmt or "plain")
        self._shared_swiglu = ops.bind(
            swiglu_quant, width=weights.shared_w13.shape[-2] // 2, fmt=self._shared_fmt or "plain"
        )
        kind = weights.w13.fmt if isinstance(weights.w13, QTensor) else "plain"
        dims = {"experts": weights.w13.shape[0], "weight": kind, "choices": per_token}  # those of this rank
        self._gemm13 = ops.bind(moe_grouped_gemm, n=weights.w13.shape[-2], k=weights.w13.shape[-1], **dims)
        self._gemm2 = ops.bind(moe_grouped_gemm, n=weights.w2.shape[-2], k=weights.w2.shape[-1], **dims)
        self._w13 = self._gemm13.prepare("weight", place_weight(ops, weights.w13))
        self._w2 = self._gemm2.prepare("weight", place_weight(ops, weights.w2))

    def __call__(self, x: Rows, step: RowContext) -> Tensor:
        """[T, H] collapsed, normed rows to [T, H]."""
        expert_ids, weights = self._gate(self._router(x), self._bias, None, None, self.per_token, self.scale)
        step.observe(f"{self.name}.route_experts", expert_ids)
        step.observe(f"{self.name}.route_weights", weights)
        rows, row_weights, psum, handle = self._dispatch(x.for_weight(self._w13), expert_ids, weights, self.num_experts)
        gate, up = self._gemm13(rows, self._w13, psum, self._dtype).split(self.width, dim=1)
        hidden = self._swiglu(gate, up, self.limit, row_weights, self._fmt)
        routed = self._gemm2(hidden, self._w2, psum, self._dtype)
        return self._combine(routed, handle, self._shared(x), self._dtype)

    def _shared(self, x: Rows) -> Tensor:
        gate, up = self._shared13(x).chunk(2, dim=1)
        hidden = self._shared_swiglu(gate, up, self.limit, None, self._shared_fmt)
        if isinstance(hidden, QTensor):
            return self._shared2(Rows(gate, hidden))
        return self._shared2(Rows(hidden))
