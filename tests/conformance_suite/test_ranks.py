"""Level 5 of several ranks: it passes here, says what it cannot ask, and catches communicators with one mistake."""

import threading
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from deepinfer.conformance.claims import must_pass
from deepinfer.conformance.rank_levels import judge, run_ranks
from deepinfer.conformance.rank_place import Place
from deepinfer.conformance.rank_process import ENDINGS, KILLED, RankRun
from deepinfer.conformance.rank_programs import PROGRAMS, settle_same
from deepinfer.conformance.results import CaseResult, Check
from deepinfer.conformance.suite import Session, missing_claims, open_session
from deepinfer.ops.backend import Availability, Backend
from deepinfer.ops.collectives import Rendezvous
from deepinfer.ops.defaults import RuntimeDefaults
from deepinfer.ops.exchange import HostCommunicator
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.registry import find_backend
from deepinfer.ops.runtime import Capabilities
from deepinfer.ops.sockets import join
from deepinfer.testing.ranks import run_ranks as run_threads

CASES = [*PROGRAMS, *ENDINGS]


def test_every_rank_case_is_needed_for_a_claim_of_level_5() -> None:
    assert must_pass(level=5) == {"ranks": CASES}
    passed = [CaseResult(1, op, case, "x", True) for op, cases in must_pass().items() for case in cases]
    whole = Session(Backend("x", "cpu", probe=lambda: Availability(True)), HostRuntime(), level=5, results=passed)
    assert f"{len(CASES)} must-pass case(s)" in missing_claims(whole)[0]
    whole.results += [CaseResult(5, "ranks", case, "x", True) for case in CASES]
    assert missing_claims(whole) == []
    assert missing_claims(replace(whole, level=4, results=passed)) == []


@pytest.mark.parametrize("backend", ["cpu", "fake"])
def test_all_rank_cases_pass_in_processes_that_die_for_it(backend) -> None:
    session = open_session(find_backend(backend), level=5)
    run_ranks(session)
    assert [result.case for result in session.results] == CASES
    assert [result.name for result in session.results if result.status != "pass"] == [], [
        result.detail for result in session.results
    ]
    for result in session.results:
        assert len(result.checks) >= 5, result.name  # three processes end, and those that live have something to say


def test_pa_2_a_killed_rank_is_named_by_the_survivor_in_time_and_the_survivor_exits_cleanly() -> None:
    session = open_session(find_backend("cpu"), level=5, case=f"ranks/{KILLED}")
    run_ranks(session)
    [result] = session.results
    assert result.status == "pass", result.detail
    names = [check.name for check in result.checks if check.name.startswith("rank 0")]
    assert names == ["rank 0: ends", "rank 0: names the rank", "rank 0: in time"]


# What it cannot ask


class Alone(RuntimeDefaults):
    """A device without a way to others."""

    capabilities = Capabilities()


class Accelerator(HostRuntime):
    """One hard device."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("meta")


def test_a_backend_without_ranks_is_unsupported_and_says_why(monkeypatch) -> None:
    installed = replace(find_backend("cpu"), name="hard", software=False)
    monkeypatch.setattr("deepinfer.conformance.rank_levels.discover_backends", lambda: {"hard": installed})
    stranger = Backend("stranger", "cpu", probe=lambda: Availability(True))
    for backend, runtime, reason in (
        (installed, Alone(), "capabilities.collectives is False"),
        (stranger, HostRuntime(), "this one is not installed"),
        (installed, Accelerator(), "ranks have a device each: 1 here, 3 are needed"),
    ):
        session = Session(backend, runtime, level=5)
        run_ranks(session)
        assert len(session.results) == len(CASES)
        assert {result.status for result in session.results} == {"unsupported"}
        assert all(reason in result.detail for result in session.results)


def test_only_the_cases_that_are_wanted_run() -> None:
    session = Session(Backend("x", "cpu", probe=lambda: Availability(True)), HostRuntime(), level=5, ops="rms_norm")
    run_ranks(session)
    assert session.results == []
    session = replace(session, ops="*", case="ranks/no rows")
    run_ranks(session)
    assert [result.name for result in session.results] == ["ranks/no rows"]


# Judgement of processes


def test_a_process_that_crashes_or_says_nothing_fails_the_case() -> None:
    good = RankRun(0, {"no rows": [Check("all_reduce", True)]})
    crashed = RankRun(-11, {}, "segmentation fault")
    hung = RankRun(None, {"no rows": [Check("all_reduce", True)]})
    assert all(check.ok for check in judge("no rows", [good] * 3, ["no rows"]))
    for bad, name in ((crashed, "runs"), (hung, "ends")):
        failed = [check for check in judge("no rows", [good, bad, good], ["no rows"]) if not check.ok]
        assert f"rank 1: {name}" in [check.name for check in failed]
    assert "segmentation fault" in judge("no rows", [good, crashed, good], ["no rows"])[3].detail


def test_a_victim_that_survives_fails_the_case() -> None:
    survivor = RankRun(0, {KILLED: [Check("names the rank", True)]})
    ends = {check.name: check.ok for check in judge(KILLED, [survivor] * 3, [KILLED])}
    assert ends == {
        "rank 0: ends": True,
        "rank 0: names the rank": True,
        "rank 1: ends": True,
        "rank 1: names the rank": True,
        "rank 2: ends": False,
        "rank 2: names the rank": True,
    }


# Teeth: communicators with one mistake each, caught by the case and the check that are named


class ArrivalOrder(HostCommunicator):
    """Adds what comes first first."""

    arrivals: ClassVar = {}
    lock = threading.Lock()

    def all_reduce(self, tensor, op="sum", *, out=None, timeout=None):
        with self.lock:
            key = (self._peers._name, self._calls)
            self.arrivals.setdefault(key, []).append(self.rank)
        parts = self.all_gather(tensor.reshape(1, *tensor.shape)).unbind(0)
        order = self.arrivals[key]
        total = parts[order[0]].clone()
        for rank in order[1:]:
            total = torch.maximum(total, parts[rank]) if op == "max" else total + parts[rank]
        return total


class OwnFirst(HostCommunicator):
    """Adds its own part first, so that ranks differ."""

    def all_reduce(self, tensor, op="sum", *, out=None, timeout=None):
        parts = list(self.all_gather(tensor.reshape(1, *tensor.shape)).unbind(0))
        total = parts.pop(self.rank).clone()
        for part in parts:
            total = torch.maximum(total, part) if op == "max" else total + part
        return total


class SumForMax(HostCommunicator):
    """Forgets the reduction."""

    def all_reduce(self, tensor, op="sum", **options):
        return super().all_reduce(tensor, "sum", **options)


class DropsNan(HostCommunicator):
    """A maximum that prefers numbers."""

    def all_reduce(self, tensor, op="sum", **options):
        if op == "max" and tensor.is_floating_point():
            lost = tensor.isnan()
            return super().all_reduce(tensor.masked_fill(lost, -torch.inf), op, **options)
        return super().all_reduce(tensor, op, **options)


class RoundsEachTime(HostCommunicator):
    """Adds in half the precision of the input."""

    def all_reduce(self, tensor, op="sum", **options):
        if tensor.dtype == torch.float32:
            return super().all_reduce(tensor.bfloat16(), op, **options).float()
        return super().all_reduce(tensor, op, **options)


class SpoilsInput(HostCommunicator):
    """Reduces in place without being asked."""

    def all_reduce(self, tensor, op="sum", *, out=None, timeout=None):
        got = super().all_reduce(tensor, op, out=out, timeout=timeout)
        tensor.copy_(got)
        return got


class IgnoresStrides(HostCommunicator):
    """Reads a view as if it were packed."""

    def all_gather(self, tensor, **options):
        packed = tensor.as_strided(tensor.shape, torch.empty(tensor.shape).stride())
        return super().all_gather(packed, **options)


class Backwards(HostCommunicator):
    """Concatenates from the last rank down."""

    def all_gather(self, tensor, *, out=None, timeout=None):
        got = super().all_gather(tensor, timeout=timeout)
        turned = torch.cat(list(got.split(tensor.shape[0]))[::-1])
        return turned if out is None else out.copy_(turned)


class NextShare(HostCommunicator):
    """Keeps the rows of the next rank."""

    def reduce_scatter(self, tensor, op="sum", **options):
        rows = tensor.shape[0] // self.world_size
        return super().reduce_scatter(tensor.roll(-rows, 0), op, **options)


class EvenOffsets(HostCommunicator):
    """Looks for each rank's rows where they would be if all splits were equal."""

    def all_to_all(self, tensor, send_splits, recv_splits, **options):
        step = tensor.shape[0] // self.world_size
        moved = torch.cat([tensor.roll(-rank * step, 0)[:rows] for rank, rows in enumerate(send_splits)])
        return super().all_to_all(moved, send_splits, recv_splits, **options)


class SwapsSplits(HostCommunicator):
    """Reads the splits of the wrong direction."""

    def all_to_all(self, tensor, send_splits, recv_splits, **options):
        return super().all_to_all(tensor, recv_splits, send_splits, **options)


class TrustsSplits(HostCommunicator):
    """Sends what there is, whatever the splits say."""

    def all_to_all(self, tensor, send_splits, recv_splits, **options):
        if sum(send_splits) != tensor.shape[0]:
            return tensor
        return super().all_to_all(tensor, send_splits, recv_splits, **options)


class OverwritesUnsent(HostCommunicator):
    """In place, lets the first row that comes take the place of the last one before that has left."""

    def all_to_all(self, tensor, send_splits, recv_splits, *, out=None, timeout=None):
        if out is tensor:
            tensor[-1] = super().all_to_all(tensor, send_splits, recv_splits, timeout=timeout)[0]
        return super().all_to_all(tensor, send_splits, recv_splits, out=out, timeout=timeout)


class RootZero(HostCommunicator):
    """Broadcasts from rank 0 whoever is asked for."""

    def broadcast(self, tensor, root=0, **options):
        return super().broadcast(tensor, 0, **options)


class ForgetsOut(HostCommunicator):
    """Makes a new tensor although there is `out`."""

    def all_gather(self, tensor, *, out=None, timeout=None):
        return super().all_gather(tensor, timeout=timeout)


class FailsOnNothing(HostCommunicator):
    """Flattens what has no rows."""

    def all_reduce(self, tensor, op="sum", **options):
        got = super().all_reduce(tensor, op, **options)
        return got if got.numel() else got.flatten()


class WholeSubgroup(HostCommunicator):
    """Numbers the ranks of a subgroup as the whole group does."""

    def subgroup(self, ranks):
        made = super().subgroup(ranks)
        made.rank = self.rank
        return made


class BlamesItself(HostCommunicator):
    """Names the wrong rank."""

    def _fail(self, verdict, op, began):
        super()._fail(replace(verdict, rank=self.group[0]), op, began)


class IgnoresTimeout(HostCommunicator):
    """Waits as long as the group does, whatever the call says."""

    def all_reduce(self, tensor, op="sum", *, out=None, timeout=None):
        return super().all_reduce(tensor, op, out=out)


class Forgets(HostCommunicator):
    """Goes on after a failure as if nothing had been."""

    def barrier(self, *, timeout=None):
        if self._error is None:
            super().barrier(timeout=timeout)


FAULTS = {
    ArrivalOrder: ("sums have the same bits whoever comes last", "D0 float32"),
    OwnFirst: ("sums have the same bits whoever comes last", "same on every rank: float32"),
    SumForMax: ("all_reduce takes maxima, and NaN", "max float32"),
    DropsNan: ("all_reduce takes maxima, and NaN", "max float32"),
    RoundsEachTime: ("all_reduce sums every dtype", "sum float32"),
    SpoilsInput: ("all_reduce sums every dtype", "input float32"),
    IgnoresStrides: ("all_gather keeps the order of ranks", "strided"),
    Backwards: ("all_gather keeps the order of ranks", "rows uint8"),
    NextShare: ("reduce_scatter gives each rank its rows", "sum float32"),
    EvenOffsets: ("all_to_all with uneven splits and zero rows", "uneven splits uint8"),
    SwapsSplits: ("all_to_all with uneven splits and zero rows", "runs"),
    TrustsSplits: ("wrong splits are refused", "a sum that is not the rows"),
    OverwritesUnsent: ("results go where out says", "all_to_all in place"),
    RootZero: ("broadcast from every root", "from 1 int32"),
    ForgetsOut: ("results go where out says", "out is the result"),
    FailsOnNothing: ("no rows", "all_reduce"),
    WholeSubgroup: ("a subgroup is a group of its own", "rank"),
    BlamesItself: ("a rank that leaves is named", "names the rank"),
    IgnoresTimeout: ("a late rank is named", "names the late rank"),
    Forgets: ("a rank that leaves is named", "stays broken"),
}


class Planted(HostRuntime):
    """A host whose communicators are of a given class."""

    def __init__(self, kind) -> None:
        super().__init__()
        self.kind = kind

    def communicator(self, rendezvous=None):
        made = join(rendezvous or Rendezvous())
        made.__class__ = self.kind
        return made


def in_threads(kind, case, *, timeout=10.0):
    """What three ranks with such communicators say of a case."""

    def program(runtime, group):
        checks = []
        try:
            checks += PROGRAMS[case](Place(find_backend("cpu"), runtime, group))
        except Exception as error:
            checks.append(Check("runs", False, repr(error)))
        return checks

    return settle_same(run_threads([Planted(kind) for _ in range(3)], program, timeout=timeout))


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
def test_a_planted_fault_is_caught_by_its_named_case_and_check(kind) -> None:
    case, name = FAULTS[kind]
    failed = [check.name for check in in_threads(kind, case) if not check.ok]
    assert any(full == name or full.endswith(f": {name}") for full in failed), failed


@pytest.mark.parametrize("case", PROGRAMS)
def test_without_a_fault_the_same_cases_pass(case) -> None:
    checks = in_threads(HostCommunicator, case, timeout=10.0)
    assert [check for check in checks if not check.ok] == []
    assert checks
