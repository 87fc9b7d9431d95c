"""Level 5's cases of divided experts catch exchanges with one mistake each, at the check that is named."""

import pytest
import torch

from deepinfer.conformance.rank_experts import EACH, EXPERT_PROGRAMS
from deepinfer.conformance.rank_place import Place
from deepinfer.conformance.rank_programs import settle_same
from deepinfer.conformance.results import Check
from deepinfer.ops.expert_ranks import PLANS, CombineOverRanks, DispatchOverRanks
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.moe import DispatchHandle
from deepinfer.ops.registry import find_backend
from deepinfer.testing.ranks import run_ranks

DISPATCH, COMBINE, EVEN, CAPTURED = EXPERT_PROGRAMS


def in_threads(case, ranks=3):
    """What ranks in threads say of a case."""

    def program(runtime, group):
        checks = []
        try:
            checks += EXPERT_PROGRAMS[case](Place(find_backend("cpu"), runtime, group))
        except Exception as error:
            checks.append(Check("runs", False, repr(error)))
        return checks

    return settle_same(run_ranks([HostRuntime() for _ in range(ranks)], program, timeout=5.0))


class Group:
    """A communicator whose `all_to_all` is changed afterwards by `change(got, sent rows, splits of what came)`."""

    def __init__(self, group, change) -> None:
        self._group, self._change = group, change

    def __getattr__(self, name):
        return getattr(self._group, name)

    def all_to_all(self, tensor, send, receive, *, out=None):
        got = self._group.all_to_all(tensor, send, receive, out=out)
        return got.copy_(self._change(got.clone(), tensor, list(receive)))


def moving(plan, change):
    """The plan with such a communicator."""

    class Changed(plan):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            self._group = Group(self._group, change)

    return Changed


def backwards(got, sent, splits):
    """Rows of the last source first."""
    return torch.cat(got.split(splits)[::-1])


def lost_row(got, sent, splits):
    """The last row does not come."""
    if len(got):
        got[-1] = 0
    return got


def weights_stay(got, sent, splits):
    """Weights keep their places in memory, so a row has that of another."""
    return got.roll(1) if got.dim() == 1 else got


def scales_stay(got, sent, splits):
    """Codes come with scales of other rows."""
    return got.roll(1, 0) if got.dtype == torch.uint8 and got.shape[1] < 64 else got


class GlobalIds(DispatchOverRanks):
    """Every rank takes itself for the first."""

    def _prepare_tables(self, choices) -> None:
        super()._prepare_tables(choices)
        experts = torch.arange(self.experts, dtype=torch.int32)
        self._local = torch.where(experts < EACH, experts, -1)


class FirstHolder(DispatchOverRanks):
    """Looks for every result at rank 0."""

    def _prepare_tables(self, choices) -> None:
        super()._prepare_tables(choices)
        self._holders = torch.zeros_like(self._holders)


class SignLost(DispatchOverRanks):
    """Makes a large expert of -1: its high word is that of a positive id."""

    def _prepare_tables(self, choices) -> None:
        super()._prepare_tables(choices)
        look_up = self._look_up
        self._look_up = lambda table, rows: (
            torch.zeros_like(rows) if table is self._high_words else look_up(table, rows)
        )


class AlwaysCounts(DispatchOverRanks):
    """Asks the host in every step."""

    def _even(self, x, expert_ids, weights):
        return self._counted(x, expert_ids, weights)


class RankOrder(CombineOverRanks):
    """Adds results in the order of ranks, not of choices."""

    def run(self, *inputs, **options):
        y, handle, *rest = inputs
        return super().run(y, DispatchHandle(handle.slot_to_row.sort(1).values, handle.exchange), *rest, **options)


class NobodysRow(CombineOverRanks):
    """Gives choices of nobody the first row."""

    def run(self, *inputs, **options):
        y, handle, *rest = inputs
        return super().run(y, DispatchHandle(handle.slot_to_row.clamp(min=0), handle.exchange), *rest, **options)


class SentAsTheyAre(CombineOverRanks):
    """Sends results in the order of experts, as the products left them."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self._pick = lambda y, handle, bias, out_dtype: y


class HomeAlone(CombineOverRanks):
    """Keeps results where they were computed."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self._group = Group(self._group, lambda got, sent, splits: sent[:1].expand_as(got) if len(sent) else got)


class Boasts(CombineOverRanks):
    """Says that a graph can hold it, whatever the communicator says."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.capturable = True


D, C = DispatchOverRanks, CombineOverRanks
FAULTS = {
    "sources backwards": (moving(D, backwards), DISPATCH, "uneven, bf16: rows"),
    "a lost row": (moving(D, lost_row), DISPATCH, "uneven, bf16: rows"),
    "weights stay": (moving(D, weights_stay), DISPATCH, "uneven, bf16: weights"),
    "scales stay": (moving(D, scales_stay), DISPATCH, "uneven, mxfp8: scales"),
    "global ids": (GlobalIds, EVEN, "as many as may be, bf16: ends"),
    "the first holder": (FirstHolder, EVEN, "as many as may be, bf16 float32"),
    "a lost sign": (SignLost, EVEN, "runs"),
    "always counts": (AlwaysCounts, EVEN, "as many as may be, bf16: waits"),
    "sums in rank order": (RankOrder, COMBINE, "uneven float32"),
    "nobody's row": (NobodysRow, COMBINE, "choices of nobody float32"),
    "sent as they are": (SentAsTheyAre, COMBINE, "uneven bfloat16"),
    "results come backwards": (moving(C, backwards), COMBINE, "uneven bfloat16"),
    "a lost result": (moving(C, lost_row), COMBINE, "one expert takes all float32"),
    "results stay": (HomeAlone, COMBINE, "uneven bfloat16"),
    "capturable without a reason": (Boasts, CAPTURED, "an even combine promises no more than its group"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught_by_its_named_case_and_check(name, monkeypatch) -> None:
    plan, case, check = FAULTS[name]
    monkeypatch.setitem(PLANS, "ep_combine" if issubclass(plan, C) else "ep_dispatch", plan)
    failed = [check.name for check in in_threads(case) if not check.ok]
    assert any(full.endswith(f": {check}") for full in failed), failed


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("case", EXPERT_PROGRAMS)
def test_without_a_fault_all_numbers_of_ranks_pass(case, ranks) -> None:
    checks = in_threads(case, ranks)
    assert [check for check in checks if not check.ok] == []
    assert len(checks) >= ranks
