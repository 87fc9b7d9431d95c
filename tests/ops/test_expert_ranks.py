"""Experts divided among ranks: what is refused, who is named, whose memory is used. Values are cases of level 5."""

import time

import pytest
import torch

from deepinfer.backends.fake.faults import Fault, FaultPlan
from deepinfer.backends.fake.runtime import FakeRuntime
from deepinfer.ops.backend import BindContext
from deepinfer.ops.errors import DeviceLostError, OpArgumentError, RankLostError
from deepinfer.ops.expert_ranks import ExpertRanks
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.moe import DispatchHandle, ep_combine, ep_dispatch, moe_gate
from deepinfer.ops.outputs import StepArenas
from deepinfer.ops.registry import OpTable, find_backend
from deepinfer.testing.ranks import run_ranks

EXPERTS, CHOICES, HIDDEN = 6, 2, 32


def table(runtime, group, even_rows=0, backend="cpu"):
    context = BindContext(runtime.device, runtime, expert_ranks=ExpertRanks(group, even_rows))
    return OpTable(find_backend(backend), context, strict=True, overrides={})


def bind(ops):
    return ops.bind(ep_dispatch, experts=EXPERTS, k=CHOICES), ops.bind(ep_combine, k=CHOICES)


def tokens(runtime, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(count, EXPERTS, generator=generator).argsort(1)[:, :CHOICES].contiguous()
    weights = torch.rand(count, CHOICES, generator=generator)
    return tuple(runtime.to_device(part) for part in (x, ids, weights))


def on_host(program, ranks=2, **options):
    return run_ranks([HostRuntime() for _ in range(ranks)], program, **options)


def test_experts_that_ranks_cannot_share_are_refused_at_bind() -> None:
    def program(runtime, group):
        bind(table(runtime, group))

    for outcome in on_host(program, ranks=4):
        assert isinstance(outcome, OpArgumentError)
        assert str(outcome) == "6 experts cannot be divided evenly among 4 ranks"


def test_a_rank_holds_its_share() -> None:
    outcomes = on_host(lambda runtime, group: ExpertRanks(group).share(EXPERTS), ranks=3)
    assert outcomes == [range(0, 2), range(2, 4), range(4, 6)]


def test_only_the_two_exchanging_ops_are_bound_over_ranks() -> None:
    ops = table(HostRuntime(), HostRuntime().communicator())
    dispatch, combine = bind(ops)
    assert dispatch.implementation == "cpu.ep_dispatch over 1 ranks" and dispatch.native
    assert combine.implementation == "cpu.ep_combine over 1 ranks"
    assert ops.bind(moe_gate, experts=EXPERTS, k=CHOICES).implementation == "cpu.moe_gate"
    assert ops.bind_here(ep_combine, k=CHOICES).implementation == "cpu.ep_combine"
    assert ops.bind(ep_dispatch, experts=EXPERTS, k=CHOICES) is dispatch


def test_another_number_of_experts_than_at_bind_is_refused() -> None:
    runtime = HostRuntime()
    dispatch, _ = bind(table(runtime, runtime.communicator()))
    with pytest.raises(OpArgumentError, match="bound for 6 experts over all ranks, called with 4"):
        dispatch(*tokens(runtime, 3), 4)


def test_a_handle_of_one_rank_is_refused() -> None:
    runtime = HostRuntime()
    _, combine = bind(table(runtime, runtime.communicator()))
    handle = DispatchHandle(torch.zeros(1, CHOICES, dtype=torch.int32))
    with pytest.raises(OpArgumentError, match="the handle is of a dispatch on one rank"):
        combine(torch.zeros(2, HIDDEN), handle, None, torch.float32)


@pytest.mark.parametrize("counts", [(3, 2), (4, 9), (0, 3)], ids=["both even", "one longer", "one without rows"])
def test_ranks_that_break_the_promise_of_even_rows_are_told_so(counts) -> None:
    def program(runtime, group):
        dispatch, _ = bind(table(runtime, group, even_rows=4))
        dispatch(*tokens(runtime, counts[group.rank]), EXPERTS)

    outcomes = on_host(program)
    assert all(isinstance(outcome, OpArgumentError) for outcome in outcomes), outcomes
    assert all("sends 'call 1: all_gather" in str(outcome) for outcome in outcomes), outcomes


@pytest.mark.parametrize("even_rows", [0, 8], ids=["counted", "even"])
def test_a_rank_that_is_gone_is_named(even_rows) -> None:
    def program(runtime, group):
        dispatch, combine = bind(table(runtime, group, even_rows))
        rows, _, _, handle = dispatch(*tokens(runtime, 4), EXPERTS)
        if group.rank == 1:
            return None  # leaves between dispatch and combine
        return combine(rows, handle, None, torch.bfloat16)

    began = time.monotonic()
    first, second, third = on_host(program, ranks=3, timeout=60)
    assert second is None
    for outcome in (first, third):
        assert isinstance(outcome, RankLostError) and outcome.rank == 1 and outcome.op == "all_to_all"
    assert time.monotonic() - began < 30  # the timeout did not have to pass


@pytest.mark.parametrize("even_rows", [0, 8], ids=["counted", "even"])
def test_a_device_that_dies_in_the_exchange_is_named_by_the_others(even_rows) -> None:
    def program(runtime, group):
        dispatch, combine = bind(table(runtime, group, even_rows, "fake"))
        rows, _, _, handle = dispatch(*tokens(runtime, 4), EXPERTS)
        runtime.to_host(combine(rows, handle, None, torch.bfloat16))

    dead = FaultPlan([Fault("death", at=1, name="all_to_all")])
    runtimes = [FakeRuntime(rank, faults=dead if rank == 2 else None) for rank in range(3)]
    *others, victim = run_ranks(runtimes, program)
    assert isinstance(victim, DeviceLostError)
    assert all(isinstance(outcome, RankLostError) and outcome.rank == 2 for outcome in others), others


def test_even_steps_take_the_memory_of_results_from_the_engine_and_use_it_again() -> None:
    """The fake device raises where memory is used after an arena took it back, or read before it was written."""

    def program(runtime, group):
        ops = table(runtime, group, 8, "fake")
        dispatch, combine = bind(ops)
        arenas, sums, sizes = StepArenas(runtime), [], []
        for step in range(6):
            arenas.begin_step()
            with ops.outputs.taken_from(arenas.new), runtime.sync_guard.forbid("a step"):
                rows, _, _, handle = dispatch(*tokens(runtime, 5, seed=step % 2), EXPERTS)
                result = combine(rows, handle, None, torch.bfloat16)
            sums.append(runtime.to_host(result))
            sizes.append(arenas._arenas[0].num_bytes)
        return sums, sizes

    for sums, sizes in run_ranks([FakeRuntime(rank) for rank in range(2)], program):
        assert all(torch.equal(sums[step], sums[step % 2]) for step in range(6))
        assert sizes[2:] == [sizes[2]] * 4 and sizes[2] > 0
