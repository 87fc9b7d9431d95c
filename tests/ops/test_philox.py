from __future__ import annotations

import math

import pytest
import torch

from deepinfer.ops.philox import MASK32, UNIFORM_MAX, Purpose, gumbel, philox4x32, random_words, uniform

# counter, key, words: the known answers that Random123 publishes for philox4x32-10
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK32,) * 4, (MASK32,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def _ints(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([v], dtype=torch.int64) for v in values)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_words_match_the_published_known_answers(counter, key, words):
    assert tuple(int(w) for w in philox4x32(_ints(*counter), _ints(*key))) == words


def test_counter_holds_id_index_purpose_choice_and_anchor_as_the_design_says():
    seed, k, choice, anchor = 0x0123456789ABCDEF, 70000, 3, 69998
    words = random_words(
        torch.tensor([seed]),
        torch.tensor([k]),
        torch.tensor([choice]),
        Purpose.DRAFT,
        10,
        torch.tensor([anchor]),
    )
    for v in range(10):
        want = philox4x32(_ints(v // 4, k, 1 + 256 * choice, anchor), _ints(seed & MASK32, seed >> 32))
        assert int(words[0, v]) == int(want[v % 4])


def test_seed_is_unsigned():
    high = 2**63 + 12345
    words = random_words(torch.tensor([high - 2**64]), torch.tensor([0]), torch.tensor([0]), 0, 4)
    want = philox4x32(_ints(0, 0, 0, 0), _ints(high & MASK32, high >> 32))
    assert words[0].tolist() == [int(w) for w in want]


def test_a_row_does_not_depend_on_other_rows_or_on_the_number_of_ids():
    seeds, index, choice = torch.arange(5), torch.arange(5), torch.zeros(5, dtype=torch.int64)
    words = random_words(seeds, index, choice, 0, 37)
    for row in range(5):
        one = slice(row, row + 1)
        assert torch.equal(random_words(seeds[one], index[one], choice[one], 0, 9)[0], words[row, :9])


def test_streams_of_one_request_differ():
    seed, zero = torch.tensor([7]), torch.tensor([0])
    streams = [random_words(seed, zero, zero, purpose, 8) for purpose in Purpose]
    streams.append(random_words(seed, zero, zero + 1, Purpose.TARGET, 8))
    streams.append(random_words(seed, zero + 1, zero, Purpose.TARGET, 8))
    streams.append(random_words(seed, zero, zero, Purpose.TARGET, 8, zero + 1))
    assert len({tuple(s[0].tolist()) for s in streams}) == len(streams)


def test_no_rows_give_no_words():
    none = torch.zeros(0, dtype=torch.int64)
    assert random_words(none, none, none, 0, 5).shape == (0, 5)


def test_uniforms_and_gumbels_are_finite_at_both_ends():
    words = torch.tensor([0, 1, 2**31, MASK32 - 1, MASK32])
    u, g = uniform(words), gumbel(words)
    assert u.dtype == g.dtype == torch.float32
    assert u[0] == 0.5 * 2.0**-32 and u[-1] == UNIFORM_MAX
    assert g.isfinite().all() and g[-1] > -2.82 and g[0] < 22.88


def test_gumbels_have_the_moments_of_a_gumbel():
    words = random_words(torch.tensor([3]), torch.tensor([0]), torch.tensor([0]), 0, 200_000)
    g = gumbel(words)[0].double()
    assert abs(float(g.mean()) - 0.5772156649) < 0.02
    assert abs(float(g.var()) - math.pi**2 / 6) < 0.03
