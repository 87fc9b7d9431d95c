"""The bfloat16 comparison with golden folders: its verdicts, and the CPU and any GPU held against it."""

import os
from pathlib import Path

import pytest
import torch

from deepinfer.ops.registry import discover_backends
from tools.golden_bf16 import compare, judge

GOLDEN = Path(os.environ.get("DEEPINFER_GOLDEN", Path(__file__).resolve().parents[3] / "shared" / "golden"))
YARDSTICK = {"mean_abs_diff_bf16": 0.02, "argmax_agree_bf16": 0.95}


def logits(seed, rows=50, ids=40):
    return torch.randn(rows, ids, generator=torch.Generator().manual_seed(seed)) * 3


def test_logits_as_close_as_the_yardstick_hold():
    want = logits(0)
    line = judge("p", want + 0.02 * logits(1).sign(), want, YARDSTICK)
    assert line.holds and line.length == 50
    assert line.mean_diff == pytest.approx(0.02, rel=1e-4) and line.most == pytest.approx(0.03)
    assert line.agreement >= line.least == pytest.approx(0.90)


def test_what_is_further_off_falls_short():
    want = logits(0)
    assert not judge("p", want + 0.031 * logits(1).sign(), want, YARDSTICK).holds
    wrong = want.clone()
    for row in range(6):  # of 50: 0.88 agree; the mean hardly moves
        best = int(want[row].argmax())
        wrong[row, best] = want[row].topk(2).values[1] - 1e-3
    line = judge("p", wrong, want, {**YARDSTICK, "mean_abs_diff_bf16": 1.0})
    assert line.agreement == pytest.approx(0.88) and not line.holds and str(line).startswith("FAIL")


def test_nan_falls_short():
    want = logits(0)
    got = want.clone()
    got[3, 4] = torch.nan
    assert not judge("p", got, want, YARDSTICK).holds


@pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden files at {GOLDEN}")
@pytest.mark.parametrize("folder", ["plain", "quant"])
@pytest.mark.parametrize("backend", ["cpu", "cuda_sm90", "cuda_sm100"])
def test_a_backend_is_within_the_golden_bounds(backend, folder):
    answer = discover_backends()[backend].probe()
    if not answer.available:
        pytest.skip(f"{backend}: {answer.reason}")
    lines = list(compare(GOLDEN / folder, backend))
    assert len(lines) >= 2
    assert [str(line) for line in lines if not line.holds] == []
