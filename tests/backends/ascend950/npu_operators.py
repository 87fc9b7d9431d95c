"""torch_npu's operators on the host, written from their documentation: what the page says, in plain torch.

They stand for the device in tests of `providers.py`. Each is called with the arguments of the real operator, and its
results are compared with those of the operator's own meta function where it has one that answers. Defaults are those
of the schemas: the dispatcher drops an argument that equals its default.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_DTYPES = {15: torch.bfloat16, 6: torch.float32}
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    rstd = (x.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


def npu_dynamic_mx_quant(x: Tensor, *, dst_type: int, scale_alg: int, max_low_bound: float) -> tuple[Tensor, Tensor]:
    assert dst_type == 292 and scale_alg == 1
    width = x.shape[-1]
    groups = torch.nn.functional.pad(x.float(), (0, -width % 32)).unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1).clamp(min=max_low_bound)
    bits = (amax / 448.0).view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) > 0).int()
    exponent = torch.where(amax.isfinite(), exponent, 255)
    reciprocal = torch.exp2(127.0 - exponent.float())
    codes = (groups * reciprocal[..., None]).clamp(-448, 448).flatten(-2)[..., :width].to(torch.float8_e4m3fn)
    scale = torch.nn.functional.pad(exponent, (0, exponent.shape[-1] % 2)).to(torch.uint8)
    return codes, scale.unflatten(-1, (-1, 2))


def _e8m0(scale: Tensor) -> Tensor:
    return torch.exp2(scale.float() - 127)


def _scaled(codes: Tensor, pairs: Tensor) -> Tensor:
    """Values [M, K] of codes [M, K] and pairs of scales [M, ceil(K / 64), 2]."""
    assert pairs.shape[1] == -(-codes.shape[1] // 64)
    return codes.float() * _e8m0(pairs).flatten(-2).repeat_interleave(32, dim=-1)[:, : codes.shape[1]]


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    pertoken_scale: Tensor,
    output_dtype: int,
    x2_dtype: int | None = None,
    scale_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    group_sizes: tuple[int, ...] = (),
) -> Tensor:
    assert (scale_dtype, pertoken_scale_dtype, list(group_sizes)) == (293, 293, [1, 1, 32])
    weight = x2.t()
    if x2_dtype == 296:
        assert weight.dtype == torch.uint8 and output_dtype == 15
        weight = _E2M1[torch.stack((weight & 15, weight >> 4), -1).flatten(-2).long()]
    left, right = _scaled(x1, pertoken_scale), _scaled(weight, scale.transpose(0, 1))
    return (left @ right.t()).to(_DTYPES[output_dtype])


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    scale: list[Tensor],
    per_token_scale: list[Tensor],
    group_list: Tensor,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    output_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[Tensor]:
    assert (split_item, group_type, group_list_type, scale_dtype, per_token_scale_dtype) == (3, 0, 0, 293, 293)
    assert group_list.dtype == torch.int64
    rows = _scaled(x[0], per_token_scale[0])
    out = rows.new_full((len(rows), weight[0].shape[2]), torch.nan)  # rows of no group are not written
    start = 0
    for place, end in enumerate(group_list.tolist()):
        matrix = _scaled(weight[0][place].t(), scale[0][place].transpose(0, 1))
        out[start:end] = rows[start:end] @ matrix.t()
        start = end
    return [out.to(_DTYPES[output_dtype])]


def npu_mhc_post(x: Tensor, h_res: Tensor, h_out: Tensor, h_post: Tensor) -> Tensor:
    kept = h_res.transpose(1, 2) @ x.float()
    return (kept + h_post[..., None] * h_out.float()[:, None]).to(x.dtype)


def npu_mhc_pre(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, *, norm_eps: float = 1e-6, out_flag: int = 0
) -> tuple[Tensor, ...]:
    assert out_flag == 1 and x.shape[2] % 16 == 0
    rows, streams = x.shape[:2]
    flat = x.float().flatten(1)
    inverse = (flat.square().mean(-1) + norm_eps).rsqrt()
    product = flat @ phi.t()
    parts = (streams, streams, streams * streams)
    pre, post, res = (
        part * a + b
        for part, a, b in zip((product * inverse[:, None]).split(parts, 1), alpha, bias.split(parts), strict=True)
    )
    pre = pre.sigmoid() + 1e-6
    inside = (pre[..., None] * x.float()).sum(1).to(x.dtype)
    return inside, 2 * post.sigmoid(), res.reshape(rows, streams, streams), inverse, product, pre


def npu_mhc_sinkhorn(x: Tensor, *, eps: float = 1e-6, num_iters: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    matrix = x.softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(num_iters - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix, x.new_empty(0), x.new_empty(0)


OPERATORS: dict[str, Any] = {
    function.__name__: function
    for function in (
        npu_rms_norm,
        npu_dynamic_mx_quant,
        npu_quant_matmul,
        npu_grouped_matmul,
        npu_mhc_post,
        npu_mhc_pre,
        npu_mhc_sinkhorn,
    )
}
