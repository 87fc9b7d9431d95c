"""Memory of results: what contracts declare, what arenas hand out and for how long, what ops are given."""

from types import SimpleNamespace

import pytest
import torch

from deepinfer.conformance.failures import find_case
from deepinfer.conformance.planting import run_planted
from deepinfer.conformance.runner import make_case, run_case
from deepinfer.conformance.subject import Subject
from deepinfer.conformance.values import HUGE_BYTES, copied, extent, walk
from deepinfer.ops.backend import Availability, Backend, BindContext, FunctionPlan
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.index import index_logits_ragged, topk_select
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.outputs import OutputArena, Outputs, StepArenas
from deepinfer.ops.registry import OpTable
from deepinfer.ops.trees import tensors_of


@pytest.mark.parametrize("name", defined_ops())
def test_declared_results_are_those_of_the_reference(name):
    op = defined_ops()[name]
    if op.results is None:
        assert name == "index_logits_ragged"
        return
    for case in op.cases():
        args = make_case(op, case).args if case.tag == "small" else None
        if args is None or any(extent(t) * t.element_size() > HUGE_BYTES for _, t in walk(args)):
            continue
        bound = op.signature.bind(**args)
        bound.apply_defaults()
        made = op.results(lambda shape, dtype: torch.empty(shape, dtype=dtype), SimpleNamespace(**bound.arguments))
        want = op.reference(**copied(args))
        assert type(made) is type(want)
        assert [(t.shape, t.dtype) for t in tensors_of(made)] == [(t.shape, t.dtype) for t in tensors_of(want)], case


F32, I32 = torch.float32, torch.int32


def addresses(arena, *keys):
    return [arena.new(*key).data_ptr() for key in keys]


def test_a_step_gets_no_memory_twice_and_the_next_one_the_same():
    arena = OutputArena(HostRuntime())
    keys = [((3, 4), F32), ((3, 4), F32), ((3, 4), I32), ((5,), F32)]
    first = addresses(arena, *keys)
    assert len(set(first)) == 4 and arena.num_bytes == 3 * 48 + 20
    arena.begin()
    assert addresses(arena, *keys) == first
    assert addresses(arena, ((3, 4), F32))[0] not in first


def test_what_a_step_did_not_use_is_given_back():
    arena = OutputArena(HostRuntime())
    addresses(arena, ((3, 4), F32), ((3, 4), F32), ((9,), F32))
    arena.begin()
    assert arena.num_bytes == 2 * 48 + 36
    addresses(arena, ((3, 4), F32))
    arena.begin()
    assert arena.num_bytes == 48


def test_beyond_its_bound_an_arena_keeps_nothing():
    arena = OutputArena(HostRuntime(), limit_bytes=100)
    large = arena.new((50,), F32)
    assert arena.num_bytes == 0 and large.shape == (50,)
    small = [arena.new((10,), F32) for _ in range(4)]
    assert arena.num_bytes == 80 and len({t.data_ptr() for t in small}) == 4
    arena.begin()
    assert arena.num_bytes == 80


def test_memory_made_in_a_forward_pass_can_be_written_outside():
    arena = OutputArena(HostRuntime())
    with torch.inference_mode():
        arena.new((2,), F32).fill_(1)
    arena.begin()
    assert arena.new((2,), F32).fill_(2).tolist() == [2, 2]


def test_results_of_the_step_before_stay_and_those_of_the_one_before_go():
    arenas = StepArenas(HostRuntime())
    seen = []
    for _ in range(4):
        arenas.begin_step()
        seen.append(addresses(arenas, ((8,), F32))[0])
    assert seen[0] != seen[1] and seen[2:] == seen[:2]


class Writes:
    """A capturable plan that remembers what it was given."""

    scratch_bytes = persistent_bytes = 0
    capturable = True

    def run(self, x, k, lens, *, out=None):
        self.out = out
        return topk_select.reference(x, k, lens) if out is None else out.copy_(topk_select.reference(x, k, lens))


def bound(op, plan):
    backend = Backend("acme", "cpu", lambda: Availability(True))
    backend.implements_plan(op)(lambda dims, ctx: plan)
    runtime = HostRuntime()
    table = OpTable(backend, BindContext(runtime.device, runtime), overrides={})
    return table, table.bind(op)


X, LENS = torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([3], dtype=I32)


def test_a_capturable_plan_is_given_memory_and_that_is_the_result():
    plan = Writes()
    table, select = bound(topk_select, plan)
    assert select.capturable and table.not_capturable == ()
    arena = OutputArena(HostRuntime())
    for call in (lambda: select(X, 2, LENS), lambda: select(X, lens=LENS, k=2)):
        with table.outputs.taken_from(arena.new):
            got = call()
        assert got is plan.out and got.tolist() == [[1, 2]]
    assert arena.num_bytes == 16
    assert select(X, 2, LENS) is plan.out and arena.num_bytes == 16, "outside of a step the device's allocator gives it"


def test_other_plans_make_their_results():
    plan = FunctionPlan(topk_select.reference)
    table, select = bound(topk_select, plan)
    arena = OutputArena(HostRuntime())
    with table.outputs.taken_from(arena.new):
        assert select(X, 2, LENS).tolist() == [[1, 2]]
    assert arena.num_bytes == 0 and table.not_capturable == ("topk_select",)


def test_an_op_whose_size_depends_on_values_is_never_capturable():
    table, ragged = bound(index_logits_ragged, Writes())
    assert ragged.plan.capturable and not ragged.capturable and ragged.outputs is None
    assert table.not_capturable == ("index_logits_ragged",)


def test_where_results_come_from_is_put_back_after_an_error():
    outputs = Outputs(HostRuntime())
    before = outputs.new
    with pytest.raises(ZeroDivisionError), outputs.taken_from(lambda shape, dtype: torch.empty(0)):
        1 / 0  # noqa: B018
    assert outputs.new == before


class Ignores(Writes):
    """Makes its results, whatever it is given."""

    def run(self, x, weight, eps, *, out=None):
        return rms_norm.reference(x, weight, eps)


def test_the_suite_finds_a_plan_that_ignores_out():
    made = make_case(rms_norm, find_case(rms_norm, "21 rows, bf16"))
    result = run_case(Subject(rms_norm, "planted", True, Ignores(), HostRuntime()), made)
    assert result.status == "fail" and "value" in {check.name for check in result.checks if not check.ok}
    assert run_planted(rms_norm, "21 rows, bf16", rms_norm.reference).status == "pass"
