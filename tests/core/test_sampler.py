from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from deepinfer.backends.cpu.runtime import CpuRuntime
from deepinfer.core.sampler import Sampler, derive_seed
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.ops.backend import Availability, Backend, BindContext
from deepinfer.ops.registry import OpTable
from deepinfer.ops.sampling import sample


def make_sampler(num_slots: int = 8) -> Sampler:
    """On the references: what a backend without any op would run."""
    backend = Backend("none", "cpu", probe=lambda: Availability(True))
    context = BindContext(torch.device("cpu"), CpuRuntime())
    return Sampler(OpTable(backend, context, overrides={}), num_slots)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def logits_of(num_rows: int, num_ids: int = 128, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, num_ids, generator=torch.Generator().manual_seed(seed))


def test_rows_use_the_parameters_of_their_slot():
    sampler = make_sampler()
    sampler.set_slot(1, SamplingParams(temperature=0), 0)
    sampler.set_slot(2, SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1), 2**64 - 1)
    logits = logits_of(2)
    tokens = sampler.sample(logits, ints(2, 1), ints(9, 0))
    want = sample(
        logits[:1],
        torch.tensor([0.5]),
        torch.tensor([3]).int(),
        torch.tensor([0.9]),
        torch.tensor([0.1]),
        torch.tensor([-1]),
        torch.tensor([9]).int(),
        torch.tensor([0]).int(),
    )
    assert tokens.dtype == np.int32 and tokens.tolist() == [int(want), int(logits[1].argmax())]


def test_a_seeded_request_is_the_same_with_unseeded_neighbours_in_any_order():  # SA-1
    draws = set()
    for trial in range(4):
        sampler = make_sampler()
        own, other = (1, 2) if trial % 2 == 0 else (2, 1)
        sampler.set_slot(own, SamplingParams(), 42)
        sampler.set_slot(other, SamplingParams(), derive_seed(trial, 0))
        rows = logits_of(2)[[0, 1]] if trial < 2 else logits_of(2)[[1, 0]]
        slots = ints(own, other) if trial < 2 else ints(other, own)
        draws.add(int(sampler.sample(rows, slots, ints(3, 3))[0 if trial < 2 else 1]))
    assert len(draws) == 1


def test_unseeded_requests_do_not_share_a_stream():  # SA-2
    sampler = make_sampler(16)
    for slot in range(1, 17):
        sampler.set_slot(slot, SamplingParams(), derive_seed(0, slot))
    row = torch.zeros(16, 128)
    texts = [sampler.sample(row, np.arange(1, 17, dtype=np.int32), np.full(16, k, np.int32)) for k in range(8)]
    assert len(set(map(tuple, np.array(texts).T.tolist()))) == 16


def test_top_k_off_and_top_k_64_mix_in_one_batch():  # SA-3
    logits = logits_of(2)
    together, alone = make_sampler(), []
    for slot, params in (
        (1, SamplingParams(temperature=0)),
        (2, SamplingParams(top_k=64)),
        (3, SamplingParams(top_k=0)),
    ):
        together.set_slot(slot, params, slot)
    for row, slot in enumerate((1, 2)):
        alone.append(int(together.sample(logits[row : row + 1], ints(slot), ints(0))[0]))
    assert together.sample(logits, ints(1, 2), ints(0, 0)).tolist() == alone


def test_a_huge_top_k_is_off():
    sampler = make_sampler()
    sampler.set_slot(1, SamplingParams(top_k=2**40), 5)
    sampler.set_slot(2, SamplingParams(), 5)
    logits = logits_of(1).repeat(2, 1)
    assert len(set(sampler.sample(logits, ints(1, 2), ints(0, 0)).tolist())) == 1


def test_a_slot_has_the_parameters_of_its_last_owner():
    sampler = make_sampler()
    sampler.set_slot(1, SamplingParams(temperature=2.0, top_k=2, min_p=0.5), 1)
    sampler.set_slot(1, SamplingParams(temperature=0), 1)
    logits = logits_of(1)
    assert sampler.sample(logits, ints(1), ints(0))[0] == int(logits.argmax())


def test_choices_of_one_seed_differ():
    sampler = make_sampler()
    for choice in range(8):
        sampler.set_slot(choice + 1, SamplingParams(), 5, choice)
    tokens = sampler.sample(torch.zeros(8, 128), np.arange(1, 9, dtype=np.int32), np.zeros(8, np.int32))
    assert len(set(tokens.tolist())) > 4


@pytest.mark.parametrize("slot", [0, 9, -1])
def test_slots_outside_the_engine_are_refused(slot):
    with pytest.raises(IndexError, match=r"1\.\.8"):
        make_sampler().set_slot(slot, SamplingParams(), 0)


def test_tiny_temperatures_take_the_best_token_and_ties_go_to_the_lowest_id():  # D-11
    sampler = make_sampler()
    sampler.set_slot(1, SamplingParams(temperature=1e-30), 0)
    logits = torch.zeros(1, 128)
    logits[0, [7, 90]] = 4.0
    assert {int(sampler.sample(logits, ints(1), ints(k))[0]) for k in range(20)} == {7}


def test_a_broken_row_is_marked_and_others_are_not():  # SA-5
    sampler = make_sampler()
    for slot in (1, 2, 3):
        sampler.set_slot(slot, SamplingParams(), slot)
    good = logits_of(3)
    broken = good.clone()
    broken[1] = math.nan
    want = sampler.sample(good, ints(1, 2, 3), ints(0, 0, 0)).tolist()
    assert sampler.sample(broken, ints(1, 2, 3), ints(0, 0, 0)).tolist() == [want[0], -1, want[2]]


def test_a_bitmask_is_applied_before_the_draw_also_to_what_inference_mode_made():
    sampler = make_sampler()
    sampler.set_slot(1, SamplingParams(), 0)
    with torch.inference_mode():
        logits = torch.zeros(1, 64)
    mask = torch.tensor([[0, 1 << 5]], dtype=torch.int32)
    sampler.mask(logits, mask, torch.tensor([0]).int())
    assert sampler.sample(logits, ints(1), ints(0)).tolist() == [37]


def test_logprobs_are_those_of_the_raw_logits_and_clamped_to_the_vocabulary():  # SA-4, D-2
    logits = logits_of(2, 10)
    out = make_sampler().logprobs(logits, [3, 9], num_top=11)
    want = logits.log_softmax(1)
    assert out.top_ids.shape == (2, 10)
    assert out.logprob == pytest.approx(want[[0, 1], [3, 9]].numpy(), abs=1e-5)
    assert out.rank.tolist() == [1 + int((want[i] > want[i, t]).sum()) for i, t in ((0, 3), (1, 9))]
    assert make_sampler().logprobs(logits, ints(3, 9)).top_ids.shape == (2, 0)


def test_no_rows_are_fine():
    assert make_sampler().sample(torch.zeros(0, 16), ints(), ints()).shape == (0,)


def test_derived_seeds_are_stable_unsigned_and_depend_on_everything():
    assert derive_seed(0, 0) == derive_seed(0, 0)
    seeds = [derive_seed(engine, key) for engine in (0, 1, 2**64 - 1) for key in (0, 1, 10**30, "0", "1", "a", "é", "")]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**64 for s in seeds)


def test_derived_seeds_do_not_change_between_releases():
    assert derive_seed(0, 0) == 14663258633869995807
    assert derive_seed(7, "request-1") == 9464602438672225956
