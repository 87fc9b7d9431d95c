"""torch_npu operators as further implementations of contracts, behind the kernels of this package.

Only operators whose documented semantics are those of the contract are here; docs/ascend950.md has the table of the
others and why. What an operator does not take (no rows, float32 streams, an accumulator) goes to the contract's
reference, which torch runs on the device. Nothing here can be captured: the operators allocate their results.

Source: the operators' pages in op-plugin, the aclnn pages of ops-nn and ops-transformer for Ascend 950, and the
schemas and meta functions of torch_npu 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.backends.ascend950 import BACKEND
from deepinfer.backends.ascend950.host.torch_device import import_torch_npu
from deepinfer.ops.backend import BindContext, Dims, Implementation, Plan
from deepinfer.ops.formats import GROUP, QTensor, QuantFormat
from deepinfer.ops.linear import linear_mx
from deepinfer.ops.mhc import mhc_post, mhc_prenorm_mix, mhc_split_sinkhorn
from deepinfer.ops.moe import moe_grouped_gemm
from deepinfer.ops.norm import rms_norm, rms_norm_quant
from deepinfer.ops.quant import quantize
from deepinfer.ops.spec import OpSpec

PRIORITY: Final = -10
"""Below every kernel of this package."""

_E4M3: Final = 292
_E8M0: Final = 293
_E2M1: Final = 296
"""torch_npu's numbers for types that torch has no number for, or not in every version."""
_BFLOAT16: Final = 15
_FLOAT32: Final = 6
"""torch's own numbers for result types."""
_CEIL_SCALE: Final = 1
"""`scale_alg` that rounds a group's scale up to a power of two."""
_SMALLEST_AMAX: Final = 1e-4
"""The contract's floor for the largest value of a group."""
_STREAMS: Final = (4, 6, 8)
_WIDE: Final = 64
"""Values that a pair of scales covers; products with 4-bit weights take whole pairs."""


@dataclass(frozen=True)
class ProviderPlan:
    """An operator, and the reference for what it does not take.

    Attributes:
        call: the op by way of the operator.
        fits: whether the operator takes these arguments.
        reference: the op otherwise.
    """

    call: Callable[..., Any]
    fits: Callable[..., bool]
    reference: Callable[..., Any]
    scratch_bytes: int = 0
    persistent_bytes: int = 0
    capturable: bool = False

    def run(self, *inputs: Any, **options: Any) -> Any:
        """Run the op."""
        chosen = self.call if self.fits(*inputs, **options) else self.reference
        return chosen(*inputs, **options)


def _provides(
    op: OpSpec[..., Any],
    *,
    fits: Callable[..., bool],
    when: Callable[[Dims], bool] = lambda dims: True,
    batch_invariant: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function with the op's signature.

    Args:
        op: the contract.
        fits: whether the operator takes given arguments; same signature.
        when: predicate over static dimensions.
        batch_invariant: False where the operator may choose its order of additions by the number of rows, which its
            pages do not rule out.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        plan = ProviderPlan(function, fits, op.reference)

        def bind(dims: Dims, ctx: BindContext) -> Plan:
            return plan

        BACKEND.implementations.append(
            Implementation(
                op,
                f"{BACKEND.name}.{function.__name__}",
                bind,
                when,
                PRIORITY,
                batch_invariant,
                module=__name__,
                interpreted=False,
            )
        )
        return function

    return wrap


def _npu() -> Any:
    import_torch_npu()
    return torch.ops.npu


def _has_rows(x: Tensor, *arguments: Any, **options: Any) -> bool:
    return x.numel() > 0


def _is_quantisable(x: Tensor, *arguments: Any, **options: Any) -> bool:
    # float32 rows are taken from one whole group on
    return x.numel() > 0 and (x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and x.shape[-1] >= GROUP["mxfp8"]))


@_provides(rms_norm, fits=_has_rows, batch_invariant=False)
def npu_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`npu_rms_norm`: float32 inside, the weight multiplied before the cast."""
    gamma = x.new_ones(x.shape[-1], dtype=torch.float32) if weight is None else weight
    rows: Tensor = _npu().npu_rms_norm(x, gamma, eps)[0]
    return rows


@_provides(quantize, fits=_is_quantisable, when=lambda dims: dims["fmt"] == "mxfp8")
def npu_dynamic_mx_quant(x: Tensor, fmt: QuantFormat) -> QTensor:
    """`npu_dynamic_mx_quant` with the scale rounded up and the contract's floor under a group's largest value.

    Its scales come in pairs, the last of which may be half filling.
    """
    codes, pairs = _npu().npu_dynamic_mx_quant(
        x.contiguous(), dst_type=_E4M3, scale_alg=_CEIL_SCALE, max_low_bound=_SMALLEST_AMAX
    )
    groups = -(-x.shape[-1] // GROUP[fmt])
    scale = pairs.view(torch.uint8).flatten(-2)[..., :groups].contiguous()
    return QTensor(codes.view(torch.uint8), scale, fmt)


@_provides(rms_norm_quant, fits=_is_quantisable, when=lambda dims: dims["fmt"] == "mxfp8", batch_invariant=False)
def npu_rms_norm_then_mx_quant(
    x: Tensor, weight: Tensor | None, eps: float, fmt: QuantFormat
) -> tuple[QTensor, Tensor]:
    """The two operators in turn: the fused one has no floor, and does not give the rows."""
    rows = npu_rms_norm(x, weight, eps)
    return npu_dynamic_mx_quant(rows, fmt), rows


def _pairs(scale: Tensor) -> Tensor:
    """Scales [..., K / 32] as products take them, [..., K / 64, 2]; an odd one gets a companion that is not read."""
    even: Tensor = torch.nn.functional.pad(scale, (0, 1)) if scale.shape[-1] % 2 else scale
    pairs: Tensor = even.unflatten(-1, (-1, 2))
    return pairs


def _is_product_mx(x: Tensor | QTensor, weight: QTensor, out_dtype: torch.dtype, acc: Tensor | None = None) -> bool:
    taken = (torch.bfloat16,) if weight.fmt == "mxfp4" else (torch.bfloat16, torch.float32)
    return isinstance(x, QTensor) and x.data.numel() > 0 and acc is None and out_dtype in taken


@_provides(
    linear_mx,
    fits=_is_product_mx,
    when=lambda d: d["x"] == "mxfp8" and (d["weight"] == "mxfp8" or (d["weight"] == "mxfp4" and d["k"] % _WIDE == 0)),
    batch_invariant=False,
)
def npu_quant_matmul(x: QTensor, weight: QTensor, out_dtype: torch.dtype, acc: Tensor | None = None) -> Tensor:
    """`npu_quant_matmul` with a scale per row and 32 values on both sides."""
    narrow = weight.fmt == "mxfp4"
    product: Tensor = _npu().npu_quant_matmul(
        x.data.view(torch.float8_e4m3fn),
        (weight.data if narrow else weight.data.view(torch.float8_e4m3fn)).t(),
        _pairs(weight.scale).transpose(0, 1),
        pertoken_scale=_pairs(x.scale),
        output_dtype=_BFLOAT16 if out_dtype == torch.bfloat16 else _FLOAT32,
        x2_dtype=_E2M1 if narrow else None,
        scale_dtype=_E8M0,
        pertoken_scale_dtype=_E8M0,
        group_sizes=[1, 1, GROUP["mxfp8"]],
    )
    return product


def _is_grouped_mx(x: Tensor | QTensor, weight: QTensor, psum: Tensor, out_dtype: torch.dtype) -> bool:
    return isinstance(x, QTensor) and x.fmt == "mxfp8" and x.data.numel() > 0


@_provides(
    moe_grouped_gemm,
    fits=_is_grouped_mx,
    when=lambda d: d["weight"] == "mxfp8",
    batch_invariant=False,
)
def npu_grouped_matmul(x: QTensor, weight: QTensor, psum: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`npu_grouped_matmul` over rows of one tensor, groups given by their running ends."""
    (product,) = _npu().npu_grouped_matmul(
        [x.data.view(torch.float8_e4m3fn)],
        [weight.data.view(torch.float8_e4m3fn).transpose(1, 2)],
        scale=[_pairs(weight.scale).transpose(1, 2)],
        per_token_scale=[_pairs(x.scale)],
        group_list=psum.long(),
        split_item=3,  # one result tensor
        group_type=0,  # rows are grouped
        group_list_type=0,  # by running ends
        output_dtype=_BFLOAT16 if out_dtype == torch.bfloat16 else _FLOAT32,
        scale_dtype=_E8M0,
        per_token_scale_dtype=_E8M0,
    )
    result: Tensor = product
    return result


def _is_bf16_streams(first: Tensor, *arguments: Any) -> bool:
    return first.numel() > 0 and first.dtype == torch.bfloat16


@_provides(mhc_post, fits=_is_bf16_streams, when=lambda d: d["streams"] in _STREAMS)
def npu_mhc_post(y: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`npu_mhc_post`; its two pages do not agree on whether the matrix is transposed, so a device has to say."""
    streams: Tensor = _npu().npu_mhc_post(h, comb, y, post)
    return streams


@_provides(
    mhc_prenorm_mix,
    fits=_is_bf16_streams,
    when=lambda d: d["streams"] in _STREAMS and d["hidden"] % 16 == 0,
    batch_invariant=False,
)
def npu_mhc_pre(h: Tensor, fn: Tensor, eps: float) -> Tensor:
    """The raw product and the root mean square of `npu_mhc_pre`; what it makes of them is another layer's here."""
    parts = fn.new_zeros(3)
    outputs = _npu().npu_mhc_pre(h, fn, parts, fn.new_zeros(fn.shape[0]), norm_eps=eps, out_flag=1)
    inverse_rms, product = outputs[3], outputs[4]
    mix: Tensor = product * inverse_rms[:, None]
    return mix


def _is_sinkhorn(mix: Tensor, scale: Tensor, base: Tensor, iters: int, eps: float) -> bool:
    streams = int((mix.shape[1] + 1) ** 0.5) - 1
    return mix.numel() > 0 and mix.dtype == torch.float32 and streams in _STREAMS and 1 <= iters <= 100


@_provides(mhc_split_sinkhorn, fits=_is_sinkhorn, batch_invariant=False)
def npu_mhc_sinkhorn(mix: Tensor, scale: Tensor, base: Tensor, iters: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`npu_mhc_sinkhorn` for the matrix; the two gates are elementwise and torch's."""
    streams = int((mix.shape[1] + 1) ** 0.5) - 1
    parts = (streams, streams, streams * streams)
    first, second, third = (
        part * scale[place] + bias
        for place, (part, bias) in enumerate(zip(mix.split(parts, dim=1), base.split(parts), strict=True))
    )
    comb = _npu().npu_mhc_sinkhorn(third.unflatten(1, (streams, streams)), eps=eps, num_iters=iters)[0]
    return torch.sigmoid(first) + eps, 2 * torch.sigmoid(second), comb
