from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.backends.cpu.sampling import (
    adjust_logits_cpu,
    apply_bitmask_cpu,
    apply_penalties_cpu,
    logprobs_of_cpu,
    process_logits_cpu,
    put_rows_cpu,
    sample_cpu,
    token_logprobs_cpu,
    verify_cpu,
)
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.philox import Purpose
from deepinfer.ops.sampling import MIN_GAP, apply_bitmask, best_gap, process_logits, sample, token_logprobs
from deepinfer.ops.shaping import adjust_logits, apply_penalties, logprobs_of, put_rows
from deepinfer.ops.spec import Case, OpSpec
from deepinfer.ops.verification import verify

NATIVE = {
    apply_bitmask: apply_bitmask_cpu,
    process_logits: process_logits_cpu,
    sample: sample_cpu,
    token_logprobs: token_logprobs_cpu,
    verify: verify_cpu,
    adjust_logits: adjust_logits_cpu,
    apply_penalties: apply_penalties_cpu,
    put_rows: put_rows_cpu,
    logprobs_of: logprobs_of_cpu,
}
CASES = [
    pytest.param(op, case, id=f"{op.name}-{case.name}") for op in NATIVE for case in op.cases() if case.tag == "small"
]
VOCABULARY = 129280


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(("op", "case"), CASES)
def test_kernels_equal_the_reference(op: OpSpec[..., Any], case: Case):
    args = case.make(torch.Generator().manual_seed(11))
    ours = {name: x.clone() if isinstance(x, Tensor) else x for name, x in args.items()}
    want, got = op(**args), NATIVE[op](**ours)
    if op.mutates:
        want, got = tuple(args[name] for name in op.mutates), tuple(ours[name] for name in op.mutates)
    check(got, want, op)


def check(got: Any, want: Any, op: OpSpec[..., Any]) -> None:
    if isinstance(want, tuple):
        for one, other in zip(got, want, strict=True):
            check(one, other, op)
        return
    assert got.dtype == want.dtype
    if want.dtype.is_floating_point:
        torch.testing.assert_close(got, want, rtol=op.tolerance.rtol, atol=op.tolerance.atol, equal_nan=True)
    else:
        assert torch.equal(got, want)


def random_rows(num_rows: int, num_ids: int, seed: int = 0) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    pick = torch.arange(num_rows)
    return {
        "logits": torch.randn(num_rows, num_ids, generator=gen) * (1 + pick[:, None] % 5),
        "temperature": torch.tensor([1.0, 0.7, 0.0, 1.3, 2.0])[pick % 5],
        "top_k": torch.tensor([0, 50, 3, -1, 2500, 10**7], dtype=torch.int32)[pick % 6],
        "top_p": torch.tensor([1.0, 0.9, 0.6, 0.999, 1.0, 0.95, 1.0])[pick % 7],
        "min_p": torch.tensor([0.0, 0.05, 0.0])[pick % 3],
        "seeds": torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=gen),
        "output_index": torch.randint(0, 5000, (num_rows,), generator=gen).int(),
        "choice": (pick % 4).int(),
    }


@pytest.mark.parametrize("num_ids", [1, 3, 63, 64, 65, 255, 256, 257, 1000, 5003])
def test_tokens_equal_the_reference_unless_two_sums_are_close(num_ids):
    args = random_rows(210, num_ids, seed=num_ids)
    settled = best_gap(**args) >= MIN_GAP
    assert torch.equal(sample_cpu(**args)[settled], sample(**args)[settled])


def test_tokens_equal_the_reference_at_the_models_vocabulary():
    args = random_rows(8, VOCABULARY)
    settled = best_gap(**args) >= MIN_GAP
    assert torch.equal(sample_cpu(**args)[settled], sample(**args)[settled])
    tokens = torch.randint(0, VOCABULARY, (8,), generator=torch.Generator().manual_seed(1)).int()
    want = token_logprobs(args["logits"], tokens, 20)
    check(token_logprobs_cpu(args["logits"], tokens, 20), want, token_logprobs)


@pytest.mark.parametrize("num_ids", [128, 5003])
def test_a_row_has_the_same_bits_in_any_batch_place_and_thread_count(num_ids, threads):  # LD-2
    args = random_rows(65, num_ids)
    tokens_of = torch.randint(0, num_ids, (65,), generator=torch.Generator().manual_seed(2)).int()
    threads(1)
    tokens = sample_cpu(**args)
    scores = process_logits_cpu(*list(args.values())[:5])
    logprobs = token_logprobs_cpu(args["logits"], tokens_of, 7)
    order = torch.randperm(65, generator=torch.Generator().manual_seed(3))
    for count in (1, 2):
        threads(count)
        for rows in [order, *(order[:n] for n in range(1, 65)), *(torch.tensor([r]) for r in range(65))]:
            some = {name: x[rows] for name, x in args.items()}
            assert torch.equal(sample_cpu(**some), tokens[rows])
        for rows in (order, order[:13], order[:1]):
            some = [x[rows] for x in list(args.values())[:5]]
            assert torch.equal(process_logits_cpu(*some), scores[rows])
            for got, want in zip(token_logprobs_cpu(some[0], tokens_of[rows], 7), logprobs, strict=True):
                assert torch.equal(got, want[rows])


def test_verify_gives_the_same_on_any_number_of_threads(threads):
    (args,) = (
        c.make(torch.Generator().manual_seed(0)) for c in verify.cases() if c.name == "rejection, ragged, 61 ids"
    )
    results = []
    for count in (1, 2, 2, 2):
        threads(count)
        results.append(verify_cpu(**args))
    assert all(torch.equal(a, b) for r in results for a, b in zip(r, results[0], strict=True))


def test_coupled_verification_is_plain_sampling():
    num_rows, num_ids = 400, 50
    gen = torch.Generator().manual_seed(5)
    logits = torch.randn(num_rows, num_ids, generator=gen) * 2
    options = (torch.ones(1), torch.tensor([20]).int(), torch.tensor([0.95]), torch.zeros(1))
    seeds, zero = torch.tensor([77]), torch.zeros(1).int()
    index = torch.arange(num_rows).int()
    plain = sample_cpu(
        logits,
        *(o.expand(num_rows) for o in options),
        seeds.expand(num_rows),
        index,
        zero.expand(num_rows),
    )
    drafts = plain.clone()
    wrong = torch.rand(num_rows, generator=gen) < 0.3
    drafts[wrong] = (drafts[wrong] + 1) % num_ids
    emitted: list[int] = []
    while len(emitted) < num_rows:
        k = len(emitted)
        rows = slice(k, min(k + 6, num_rows))
        count, tokens = verify_cpu(
            logits[rows],
            torch.tensor([0, len(logits[rows])]).int(),
            drafts[rows],
            *options,
            seeds,
            torch.tensor([k]).int(),
            zero,
        )
        emitted += tokens[: int(count)].tolist()
    assert emitted == plain.tolist()


def test_rejection_emits_the_target_distribution():
    n, num_ids = 100_000, 6
    gen = torch.Generator().manual_seed(9)
    target, drafted = torch.randn(num_ids, generator=gen) * 1.5, torch.randn(num_ids, generator=gen) * 1.5
    options = (torch.full((n,), 0.9), torch.full((n,), 5).int(), torch.full((n,), 0.97), torch.zeros(n))
    seeds, zero = torch.arange(n), torch.zeros(n).int()
    drafts = sample_cpu(drafted.expand(n, num_ids), *options, seeds, zero, zero, Purpose.DRAFT, zero)
    rows = torch.stack((drafts, torch.full((n,), -1).int()), 1).flatten()
    count, tokens = verify_cpu(
        target.expand(2 * n, num_ids),
        torch.arange(0, 2 * n + 1, 2).int(),
        rows,
        *options,
        seeds,
        zero,
        zero,
        mode="rejection",
        draft_logits=drafted.expand(2 * n, num_ids),
    )
    p, q = (process_logits(x[None], *(o[:1] for o in options))[0].softmax(0).double() for x in (target, drafted))
    for drawn in (tokens[::2], tokens[1::2][count == 2]):
        counts = torch.bincount(drawn.long(), minlength=num_ids).double()
        possible = p > 0
        assert counts[~possible].sum() == 0
        want = p[possible] * len(drawn)
        assert float(((counts[possible] - want) ** 2 / want).sum()) < 35  # at most 5 degrees of freedom
    assert abs(float((count == 2).double().mean()) - float(torch.minimum(p, q).sum())) < 0.006


def test_inputs_in_other_layouts_and_dtypes_are_taken():
    args = random_rows(12, 40)
    want = sample_cpu(**args)
    strided = {**args, "logits": args["logits"].T.contiguous().T, "top_k": args["top_k"].long()}
    assert torch.equal(sample_cpu(**strided), want)


def test_bitmask_works_in_place_on_a_strided_view():
    wide = torch.zeros(3, 50)
    view = wide[:, :40]
    mask = torch.zeros(1, 2, dtype=torch.int32)
    mask[0, 1] = 1
    apply_bitmask_cpu(view, mask, torch.tensor([0, -1, 0], dtype=torch.int32))
    assert view.isfinite().sum(1).tolist() == [1, 40, 1] and wide[:, 40:].eq(0).all()


def test_shapes_that_do_not_fit_are_refused():
    args = random_rows(4, 8)
    with pytest.raises(ValueError, match="one filter entry per row"):
        sample_cpu(**{**args, "top_p": args["top_p"][:3]})
    with pytest.raises(ValueError, match="num_top"):
        token_logprobs_cpu(args["logits"], torch.zeros(4).int(), 9)  # SA-4: the sampler clamps
    with pytest.raises(ValueError, match="past the mask"):
        apply_bitmask_cpu(args["logits"], torch.zeros(1, 1).int(), torch.ones(4).int())
    with pytest.raises(OpArgumentError, match="'greedy'"):
        verify_cpu(
            args["logits"], torch.tensor([0, 4]).int(), torch.zeros(4).int(), *[torch.zeros(1)] * 7, mode="greedy"
        )


def test_steep_scores_keep_the_nucleus_and_denormal_masses_do_not_matter():
    logits = torch.tensor([0.0, -1e30, -200.0, -21.4, -21.6, -math.inf, 0.0])[None]
    options = (torch.ones(1), torch.zeros(1).int(), torch.tensor([1 - 2.0**-24]), torch.zeros(1))
    assert torch.equal(process_logits_cpu(logits, *options), process_logits(logits, *options))
