"""Planted faults in norms, rotations, quantisers, products and experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer.conformance.planting import Fault, planter
from deepinfer.ops import linear, moe, norm, quant, rope
from deepinfer.ops.formats import QTensor
from deepinfer.ops.quant import e2m1_value, ue8m0_value, unpack_nibbles

FAULTS: list[Fault] = []
fault = planter(FAULTS)


@fault(norm.rms_norm, "21 rows, f32")
def eps_of_another_model(x, weight, eps):
    return norm.rms_norm.reference(x, weight, 1e-6)


@fault(norm.rms_norm, "21 rows, f32", "layout")
def takes_any_view_for_packed_memory(x, weight, eps):
    return norm.rms_norm.reference(x.as_strided(x.shape, _packed(x)), weight, eps)


@fault(norm.rms_norm, "21 rows, f32", "arguments")
def normalises_in_place(x, weight, eps):
    return x.copy_(norm.rms_norm.reference(x, weight, eps)).clone()


@fault(norm.rms_norm, "21 rows, f32", "aliasing")
def returns_its_argument(x, weight, eps):
    return x.copy_(norm.rms_norm.reference(x, weight, eps))


@fault(norm.rms_norm, "21 rows, bf16")
def leaves_the_ragged_tail_unwritten(x, weight, eps):
    out = torch.empty_like(x)
    whole = x.shape[0] // 4 * 4
    out[:whole] = norm.rms_norm.reference(x[:whole], weight, eps)
    return out


@fault(norm.rms_norm, "MN-5 no rows, bf16", "runs")
def launches_an_empty_grid(x, weight, eps):
    if x.numel() == 0:
        raise RuntimeError("invalid configuration argument")
    return norm.rms_norm.reference(x, weight, eps)


@fault(norm.rms_norm, "21 rows, f32", "D0")
def adds_in_the_order_threads_arrive(x, weight, eps):
    return norm.rms_norm.reference(x[:, torch.randperm(x.shape[1])].sort(1).values * 0 + x, weight, eps) * (
        1 + torch.randn(x.shape) * 1e-7
    )


_STALE: dict[Any, Tensor] = {}


@fault(norm.rms_norm, "two rows, f32", "D1")
def keeps_the_result_of_an_equal_shape(x, weight, eps):
    if x.shape[0] != 2 or x.shape not in _STALE:
        _STALE[x.shape] = norm.rms_norm.reference(x, weight, eps)
    return _STALE[x.shape].clone()


@fault(norm.rms_norm, "21 rows, bf16", "D1")
def one_statistic_for_a_tile_with_nan(x, weight, eps):
    out = norm.rms_norm.reference(x, weight, eps)
    for start in range(0, x.shape[0], 8):
        tile = slice(start, start + 8)
        if x[tile].isnan().all(1).any():
            out[tile] = torch.nan
    return out


@fault(norm.rms_norm_quant, "21 rows, mxfp8, bf16")
def quantises_before_rounding_to_bf16(x, weight, eps, fmt):
    y = norm.rms_norm.reference(x.float(), weight, eps)
    return quant.quantize.reference(y, fmt), y.to(x.dtype)


@fault(rope.rope, "21 rows, f32")
def pairs_halves_of_the_channels(x, positions, cos_sin, conjugate=False):
    width = cos_sin.shape[1]
    keep, turn = x[..., :-width], x[..., -width:]
    paired = turn.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    turned = rope.rope.reference(torch.cat((keep, paired), -1), positions, cos_sin, conjugate)[..., -width:]
    return torch.cat((keep, turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)), -1)


@fault(rope.rope, "21 rows, f32, back")
def never_rotates_back(x, positions, cos_sin, conjugate=False):
    return rope.rope.reference(x, positions, cos_sin)


@fault(rope.q_norm_rope, "MN-6 normalise off, 21 rows, bf16")
def always_normalises_the_query(q, positions, cos_sin, normalise=False, eps=1e-20):
    return rope.q_norm_rope.reference(q, positions, cos_sin, True, eps)


@fault(quant.quantize, "scale edges, mxfp8")
def rounds_the_scale_through_log2(x, fmt):
    exact = quant.quantize.reference(x, fmt)
    if fmt != "mxfp8":
        return exact
    amax = x.float().unflatten(-1, (-1, 32)).abs().amax(-1).clamp(min=1e-4)
    scale = ((amax / 448).log2() + 1e-4).ceil().add(127).clamp(0, 254).nan_to_num(255).to(torch.uint8)
    wide = ue8m0_value(scale).repeat_interleave(32, -1)
    codes = (x.float() / wide).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return QTensor(codes, scale, fmt)


@fault(quant.quantize, "midpoints, mxfp4")
def ties_go_away_from_zero(x, fmt):
    exact = quant.quantize.reference(x, fmt)
    up = quant.quantize.reference(x.float() * (1 + 2**-20), fmt)
    return QTensor(up.data, exact.scale, fmt)


@fault(quant.quantize, "21 rows, mxfp4, f32")
def swaps_the_nibbles(x, fmt):
    out = quant.quantize.reference(x, fmt)
    return out if fmt == "mxfp8" else QTensor((out.data << 4) | (out.data >> 4), out.scale, fmt)


@fault(quant.quantize, "21 rows, mxfp8, bf16")
def hides_nan_behind_a_scale(x, fmt):
    return quant.quantize.reference(x.nan_to_num(0.0, 0.0, 0.0), fmt)


@fault(quant.quantize, "tiny values, mxfp4")
def flushes_subnormals(x, fmt):
    return quant.quantize.reference(torch.where(x.float().abs() < 2.0**-120, 0.0, x.float()), fmt)


@fault(quant.quantize, "21 rows, mxfp8, f32", "D2")
def one_scale_for_the_whole_tensor_when_it_is_small(x, fmt):
    if x.shape[0] < 3:
        x = x.clone()
        x[..., 0] = x.abs().nan_to_num(0, 0, 0).amax()
    return quant.quantize.reference(x, fmt)


@fault(quant.dequantize, "every code and scale, mxfp8, f32")
def takes_exponent_zero_for_zero(x, dtype):
    out = quant.dequantize.reference(x, dtype)
    zero = (x.scale == 0).repeat_interleave(32, -1)[..., : out.shape[-1]] if x.fmt == "mxfp8" else None
    return out if zero is None else torch.where(zero & out.isfinite(), torch.zeros((), dtype=dtype), out)


@fault(quant.dequantize, "every code and scale, mxfp4, f32")
def reads_e2m1_as_a_signed_integer(x, dtype):
    if x.fmt != "mxfp4":
        return quant.dequantize.reference(x, dtype)
    code = unpack_nibbles(x.data)
    value = torch.where(code >= 8, -(16 - code.float()) / 2, e2m1_value(code))
    return (value * ue8m0_value(x.scale).repeat_interleave(32, -1)[..., : value.shape[-1]]).to(dtype)


@fault(linear.linear_bf16, "21 rows, f32 x f32 to f32", "D2")
def lets_the_library_choose_by_the_number_of_rows(x, weight, out_dtype, out_scale=1.0):
    half = x.shape[1] // 2
    if x.shape[0] > 4:
        return linear.linear_bf16.reference(x, weight, out_dtype, out_scale)
    parts = (
        linear.linear_bf16.reference(x[:, a:b], weight[:, a:b], torch.float32) for a, b in ((0, half), (half, None))
    )
    return (sum(parts) * out_scale).to(out_dtype)


@fault(linear.linear_bf16, "21 rows, f32 x f32 to f32")
def float32_operands_rounded_to_ten_bits_as_tensor_cores_may(x, weight, out_dtype, out_scale=1.0):
    """What TF32 keeps of a float32 is within a bfloat16 rounding, and a bound made for bfloat16 would let it pass."""

    def cut(tensor):
        bits = tensor.float().contiguous().view(torch.int32)
        kept = (bits & ~0x1FFF).view(torch.float32)
        return torch.where(tensor.isfinite(), kept, tensor.float())

    return linear.linear_bf16.reference(cut(x), cut(weight), out_dtype, out_scale)


@fault(linear.linear_mx, "accumulator, mxfp8")
def forgets_the_accumulator(x, weight, out_dtype, acc=None):
    return linear.linear_mx.reference(x, weight, out_dtype)


@fault(linear.linear_mx, "21 rows, mxfp8 x mxfp4 to f32")
def sums_in_bf16(x, weight, out_dtype, acc=None):
    left, right = quant.dequantize.reference(x, torch.bfloat16), quant.dequantize.reference(weight, torch.bfloat16)
    total = torch.zeros(left.shape[0], right.shape[0], dtype=torch.bfloat16)
    for column in range(left.shape[1]):
        total += left[:, column, None] * right[None, :, column]
    return total.to(out_dtype)


@fault(moe.moe_gate, "ties go to the smaller id")
def ties_go_to_the_larger_expert(logits, bias, image_bias, image_mask, k, scale):
    ids, weights = moe.moe_gate.reference(logits.flip(1), bias.flip(0), None, None, k, scale)
    return logits.shape[1] - 1 - ids, weights


@fault(moe.moe_gate, "21 rows")
def weighs_by_the_biased_score(logits, bias, image_bias, image_mask, k, scale):
    ids, _ = moe.moe_gate.reference(logits, bias, image_bias, image_mask, k, scale)
    s = (torch.nn.functional.softplus(logits).sqrt() + bias).gather(1, ids)
    return ids, s / (s.sum(1, keepdim=True) + 1e-20) * scale


@fault(moe.moe_gate, "large logits")
def softplus_overflows(logits, bias, image_bias, image_mask, k, scale):
    ids, _ = moe.moe_gate.reference(logits, bias, image_bias, image_mask, k, scale)
    s = logits.exp().log1p().sqrt().gather(1, ids)
    return ids, s / (s.sum(1, keepdim=True) + 1e-20) * scale


@fault(moe.moe_gate, "21 rows, images")
def chooses_for_images_as_for_text(logits, bias, image_bias, image_mask, k, scale):
    return moe.moe_gate.reference(logits, bias, None, None, k, scale)


@fault(moe.ep_combine, "21 rows, f32")
def adds_row_zero_for_no_choice(y, handle, bias, out_dtype):
    return moe.ep_combine.reference(y, moe.DispatchHandle(handle.slot_to_row.clamp(min=0)), bias, out_dtype)


@fault(moe.ep_dispatch, "one expert takes all, bf16")
def does_not_keep_the_order_of_tokens(x, expert_ids, weights, num_experts):
    rows, row_weights, psum, handle = moe.ep_dispatch.reference(
        x.flip(0), expert_ids.flip(0), weights.flip(0), num_experts
    )
    return rows, row_weights, psum, moe.DispatchHandle(handle.slot_to_row.flip(0))


@fault(moe.moe_grouped_gemm, "ragged, f32 x mxfp4 to f32")
def skips_an_expert_without_rows(x, weight, psum, out_dtype):
    ends = psum.tolist()
    counts = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    squeezed = torch.tensor([c for c in counts if c] + [0] * counts.count(0)).cumsum(0).int()
    return moe.moe_grouped_gemm.reference(x, weight, squeezed, out_dtype)


@fault(moe.moe_grouped_gemm, "ragged, f32 x mxfp4 to f32")
def reads_rows_behind_the_last_end(x, weight, psum, out_dtype):
    out = moe.moe_grouped_gemm.reference(x, weight, psum, out_dtype)
    return out + (x * 0).sum().to(out_dtype)


@fault(moe.swiglu_quant, "21 rows, f32 to f32")
def clamps_the_gate_from_below(gate, up, limit, row_weight, fmt):
    return moe.swiglu_quant.reference(gate.clamp(min=-limit / 20), up, limit, row_weight, fmt)


@fault(moe.swiglu_quant, "21 rows, f32 to f32, weighted")
def forgets_the_routing_weight(gate, up, limit, row_weight, fmt):
    return moe.swiglu_quant.reference(gate, up, limit, None, fmt)


def _packed(x: Tensor) -> tuple[int, ...]:
    return tuple(torch.empty(x.shape, device="meta").stride())
