"""Draws of long rows in the interpreter: few sums are worked out, and the best of all is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

COMMON = """
from deepinfer.backends.nvidia import interpreter
interpreter.enable()
import torch
from deepinfer.ops.philox import Purpose, uniform

generator = torch.Generator().manual_seed(3)

def floats(*shape):
    return torch.randn(*shape, generator=generator)

def keys(count):
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    return seeds, torch.arange(count).int() * 7, torch.arange(count).int() % 3

def filters(count, top_k=0, top_p=1.0):
    return torch.full((count,), top_k).int(), torch.full((count,), top_p), torch.zeros(count)
"""
BOUNDS = """
import triton
import triton.language as tl
from deepinfer.backends.nvidia.draws import earliest

@triton.jit
def bounds(out, words, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, earliest(tl.load(words + i).to(tl.uint32)))

edges = [0, 1, 2, 2**31, 2**32 - 1, 2**32 - 2, 2**32 - 257]
words = torch.randint(0, 2**32, (65536,), generator=generator)
words[: len(edges)] = torch.tensor(edges)
words[1000:2000] = torch.arange(1000) ** 2  # small words are the ones that win
out = torch.empty(65536)
bounds[(1,)](out, words, 65536)
arrival = -(-uniform(words)).double().log1p()
assert (out.double() <= arrival * (1 + 4e-7)).all(), "a bound is above"
small = uniform(words) < 0.01
assert small.sum() > 1000
assert (out.double() >= arrival * (1 - 1e-6))[small].all(), "a bound is loose where it matters"
"""
SAMPLES = """
from deepinfer.backends.nvidia.sampling import sample
from deepinfer.ops.sampling import best_gap, MIN_GAP
from deepinfer.ops.sampling import sample as reference

def check(logits, heat, **kept):
    count = len(logits)
    args = (logits, heat, *filters(count, **kept), *keys(count))
    settled = best_gap(*args) > MIN_GAP
    got, want = sample(*args), reference(*args)
    assert torch.equal(got[settled], want[settled]), (got, want, settled)
    return int(settled.sum())

wide = 17_000
rows = 3 * floats(8, wide)
rows[2:4, 16_503] = 12.0  # about even chances against all the others
rows[4:6] = rows[4:6].round()
rows[6, ::2] = -float("inf")
ones = torch.ones(8)
assert check(rows, ones) >= 7
assert check(rows, ones, top_p=0.6) >= 7
assert check(rows, ones, top_k=3) >= 7
assert check(rows[:, 1:], 0.7 * ones) >= 7  # rows that are not aligned
assert check(rows, ones * torch.arange(8).clamp(max=1)) >= 7  # one is greedy
assert check(rows, 1e-3 * ones) >= 5
assert check(rows[:, :3] * 1e-3, ones) == 8
# all ids are equally good, and many are as good as the cut: all sums are worked out
same = torch.zeros(4, 3000)
assert check(same, ones[:4]) >= 3
assert check(same, ones[:4], top_k=5) == 4
# scores so large that their sums say little: all are worked out
assert check(rows[:4] * 1e7, ones[:4]) == 4
"""
LOGPROBS = """
from deepinfer.backends.nvidia.sampling import logprobs_of, token_logprobs
from deepinfer.ops.sampling import token_logprobs as reference

logits = floats(7, 9_001).mul(4)
logits[1] = logits[1].round()
logits[2, 8150:8250] = 50.0
logits[3, 4] = float("nan")
logits[4, 8_900] = float("inf")
logits[5] = -float("inf")
logits[6, :8192] = -float("inf")  # a part without any
tokens = torch.tensor([0, 6_345, 8160, 3, 3, 3, 9_001]).int()
for num_top in (0, 3, 40):
    for rows in (logits, logits[:, 1:], logits[:, :9_000]):
        want = reference(rows, tokens, num_top)
        got = token_logprobs(rows, tokens, num_top)
        for name, g, w in zip(("logprob", "rank", "top_ids", "top_logprobs"), got, want):
            assert torch.allclose(g.double(), w.double(), rtol=1e-5, atol=1e-5, equal_nan=True), (name, num_top)
        alone = token_logprobs(rows[1:2], tokens[1:2], num_top)
        assert all(torch.equal(a, g[1:2]) for a, g in zip(alone, got))
several = torch.stack((tokens, tokens.flip(0)), 1)
logprob, rank = logprobs_of(logits, several)
got = token_logprobs(logits, tokens, 0)
assert torch.equal(logprob[:, 0].nan_to_num(7.0), got[0].nan_to_num(7.0)) and torch.equal(rank[:, 0], got[1])
"""
REJECTIONS = """
from deepinfer.backends.nvidia.verification import verify
from deepinfer.ops.sampling import sample
from deepinfer.ops.verification import verify as reference

lengths = (3, 0, 4, 1, 4)
cu_seqlens = torch.tensor((0, *lengths)).cumsum(0).int()
owner = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))
logits = 3 * floats(12, 17_000)
draft_logits = logits + 0.4 * floats(12, 17_000)
draft_logits[5:8] = logits[5:8]  # p is q: what is rejected is drawn from p
replaced = 0
for turn in range(3):
    kept = filters(5, top_p=0.9) if turn % 2 else filters(5, top_k=40 if turn else 0)
    heat = torch.tensor([1.0, 1.0, 0.8, 0.0, 1.2])
    own = keys(5)
    per_row = [x[owner] for x in (heat, *kept, *own)]
    drafts = sample(draft_logits, *per_row, int(Purpose.DRAFT))
    drafts[5] = 17_000  # no id: always rejected
    if turn == 2:
        drafts[::5] = -1
    args = (logits, cu_seqlens, drafts, heat, *kept, *own, "rejection", draft_logits)
    got, want = verify(*args), reference(*args)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]), (got, want)
    replaced += int(((got[1] >= 0) & (got[1] != drafts) & (drafts >= 0)).sum())
assert replaced > 3
"""


@pytest.mark.parametrize(
    "program", [BOUNDS, SAMPLES, LOGPROBS, REJECTIONS], ids=("bounds", "samples", "logprobs", "rejections")
)
def test_long_rows(program: str, tmp_path: Path) -> None:
    """The interpreter takes a process of its own, and a kernel's source a file."""
    file = tmp_path / "program.py"
    file.write_text(COMMON + program)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
