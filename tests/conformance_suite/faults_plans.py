"""Planted faults of plans with memory of their own, and of small ops in small batches."""

from __future__ import annotations

import torch

from deepinfer.conformance.planting import Fault, planter
from deepinfer.ops import shaping, step
from deepinfer.ops.norm import rms_norm

FAULTS: list[Fault] = []
fault = planter(FAULTS)
CASE = "two rows, bf16"


@fault(rms_norm, CASE, "persistent", persistent_bytes=64)
def leaves_a_counter_in_persistent_memory(x, weight, eps, *, persistent):
    persistent[3] += 1
    return rms_norm.reference(x, weight, eps)


@fault(rms_norm, CASE, "persistent", persistent_bytes=8)
def adds_up_what_earlier_runs_left(x, weight, eps, *, persistent):
    result = rms_norm.reference(x, weight, eps) + persistent.view(torch.float32)[0].to(x.dtype)
    persistent.view(torch.float32)[0] = 1.0
    return result


@fault(rms_norm, CASE, scratch_bytes=64)
def takes_scratch_for_zeroed(x, weight, eps, *, scratch):
    return rms_norm.reference(x, weight, eps) + scratch.view(torch.float32)[0].to(x.dtype)


@fault(step.shift, "by 5", "D2")
def shifts_a_short_batch_too_far(values, amount):
    return values + amount + (1 if len(values) < 4 else 0)


@fault(shaping.adjust_logits, "11 rows, 33 ids", "D2")
def rounds_the_sum_of_a_short_batch(logits, rows, ids, values):
    shaping.adjust_logits.reference(logits, rows, ids, values.bfloat16() if len(logits) < 4 else values)


@fault(shaping.put_rows, "all rows", "D2")
def puts_no_row_into_the_last_of_a_short_batch(x, rows, values):
    kept = rows != len(x) - 1 if len(x) < 4 else rows >= 0
    shaping.put_rows.reference(x, rows[kept], values[kept])
