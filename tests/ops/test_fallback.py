"""References through the host: what an op's contract says it touches is enough, is all, and is what goes back."""

from dataclasses import replace

import pytest
import torch

from deepinfer.conformance.runner import make_case
from deepinfer.conformance.subject import poisoned_memory
from deepinfer.conformance.values import HUGE_BYTES, copied, extent, same_bits, snapshot, walk
from deepinfer.ops.backend import Availability, Backend, BindContext
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.errors import MissingOpsError
from deepinfer.ops.fallback import THROUGH_HOST, HostPlan
from deepinfer.ops.formats import CacheFormat, PagedCache
from deepinfer.ops.heads import embedding, gather_rows
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.kv import copy_blocks, kv_gather
from deepinfer.ops.moe import moe_grouped_gemm
from deepinfer.ops.registry import OpTable
from deepinfer.ops.rope import rope
from deepinfer.ops.runtime import Capabilities
from deepinfer.ops.spec import EXACT, define_op
from deepinfer.ops.touches import Touch, at_records, at_rows, runs, views


class CopyingRuntime(HostRuntime):
    """Host memory that references reach by copies alone; what they move is counted, in bytes."""

    def __init__(self):
        super().__init__()
        self.capabilities = Capabilities()
        self.bytes_to_host = self.bytes_to_device = 0

    def to_device(self, host):
        self.bytes_to_device += host.nbytes
        return super().to_device(host).clone()

    def write(self, target, host):
        self.bytes_to_device += host.nbytes
        super().write(target, host)

    def to_host(self, tensor):
        self.bytes_to_host += tensor.nbytes
        return super().to_host(tensor).clone()

    def to_host_later(self, tensor):
        self.bytes_to_host += tensor.nbytes
        return super().to_host_later(tensor.clone())


def ids(*values):
    return torch.tensor(values, dtype=torch.int32)


def on_device(name):
    """An op of which no argument may stay on the host: here all tensors look as if they did."""
    op = defined_ops()[name]
    return replace(op, rules=replace(op.rules, host=()))


def small_cases(op):
    for case in op.cases():
        if case.tag == "small":
            made = make_case(op, case)
            if not any(extent(t) * t.element_size() > HUGE_BYTES for _, t in walk(made.args)):
                yield made


@pytest.mark.parametrize("name", defined_ops())
def test_what_the_contract_names_is_enough_and_nothing_else_is_written(name):
    """New memory is full of NaN and 0xFF, so a reference that reads more than was copied gives something else."""
    op = on_device(name)
    for made in small_cases(op):
        here, there = made.fresh(), made.fresh()
        with poisoned_memory():
            want = op.reference(**here)
            got = HostPlan(op, CopyingRuntime()).run(**there)
        differ = [
            f"{made.case.name}: {path}"
            for (path, mine), (_, theirs) in zip(walk((got, there)), walk((want, here)), strict=True)
            if not same_bits(mine, theirs)
        ]
        assert not differ


def cache(pages, kind="index", head_dim=64, records=4):
    fmt = CacheFormat(kind, head_dim)
    return PagedCache(torch.randint(0, 100, (pages, records * fmt.record_bytes), dtype=torch.uint8), fmt, records)


@pytest.mark.parametrize("kind", ["fp8", "fp4", "index", "f32"])
@pytest.mark.parametrize(("start", "stop"), [(0, 0), (1, 3), (2, 5), (4, 8), (3, 15), (0, 16), (11, 12)])
def test_views_of_records_hold_their_bytes_and_no_others(kind, start, stop):
    pool = cache(4, kind)
    before = kv_gather.reference(pool, torch.arange(16, dtype=torch.int32), torch.float32)
    for view in pool.record_views(start, stop):
        view.fill_(0xFF)
    after = kv_gather.reference(pool, torch.arange(16, dtype=torch.int32), torch.float32)
    inside = torch.zeros(16, dtype=torch.bool)
    inside[start:stop] = True
    assert after[inside].isnan().all() and torch.equal(after[~inside], before[~inside])
    assert int((pool.data == 0xFF).sum()) == (stop - start) * pool.format.record_bytes


def test_neighbours_are_one_run_and_what_is_no_index_is_left_out():
    touch = at_rows("a", lambda args: args.b + 1)
    args = type("Args", (), {"a": ids(4, 5, -1, 5, 99), "b": ids(8, 2)})
    assert runs(touch.at, args, 20) == [(3, 6), (9, 10)]
    assert runs(touch.at, args, 5) == [(3, 5)]
    assert runs(at_rows("a").at, type("Args", (), {"a": ids(-1, -1)}), 5) == []
    assert [v.tolist() for v in views(torch.arange(6), Touch("rows", ()), [(0, 2), (5, 6)])] == [[0, 1], [5]]


def moved(op, **args):
    runtime = CopyingRuntime()
    plan = HostPlan(op, runtime)
    assert not plan.capturable
    plan.run(**args)
    return runtime.bytes_to_host, runtime.bytes_to_device


def test_bytes_follow_what_is_touched_and_not_the_pool():
    small, large = (moved(kv_gather, cache=cache(n), slots=ids(3, 9, -1, 3, 11), dtype=torch.float32) for n in (4, 32))
    record = CacheFormat("index", 64).record_bytes
    assert small == large == (3 * record + 5 * 4, 5 * 64 * 4)
    twice = moved(kv_gather, cache=cache(32), slots=ids(3, 9, 5, 6, 11, 0), dtype=torch.float32)
    assert twice[0] == 6 * record + 6 * 4

    weights = torch.ones(8, 8), torch.ones(64, 8)
    small, large = (moved(embedding, weight=w, input_ids=ids(1, 5), out_dtype=torch.float32) for w in weights)
    assert small == large == (2 * 32 + 8, 2 * 32)
    small, large = (moved(rope, x=torch.ones(2, 8), positions=ids(0, 7), cos_sin=torch.ones(n, 4)) for n in (8, 64))
    assert small == large


def test_only_experts_that_have_rows_are_copied():
    x = torch.ones(3, 4)
    small, large = (
        moved(moe_grouped_gemm, x=x, weight=torch.ones(n, 2, 4), psum=psum, out_dtype=torch.float32)
        for n, psum in ((4, ids(0, 2, 2, 3)), (8, ids(0, 2, 2, 3, 3, 3, 3, 3)))
    )
    assert large[0] - small[0] == 4 * 4, "psum alone is longer"
    assert small[0] == 3 * 16 + 2 * 32 + 16


def test_blocks_are_read_where_they_come_from_and_written_where_they_go():
    runtime = CopyingRuntime()
    pool = torch.arange(64, dtype=torch.uint8).view(8, 8).clone()
    HostPlan(copy_blocks, runtime).run(pool, ids(1), ids(5))
    assert pool[5].tolist() == pool[1].tolist() == list(range(8, 16))
    assert runtime.bytes_to_device == 8


def test_a_host_table_stays_where_it_is():
    fetch = defined_ops()["engram_fetch"]
    table, rows = torch.arange(80.0).view(20, 4), ids(3, 7).view(1, 2)
    runtime = CopyingRuntime()
    got = HostPlan(fetch, runtime).run(table, rows, torch.float32)
    assert got.tolist() == [[12.0, 13.0, 14.0, 15.0, 28.0, 29.0, 30.0, 31.0]]
    assert runtime.bytes_to_host == 8


def make_table(runtime, **settings):
    backend = Backend("acme", "cpu", lambda: Availability(True))
    return OpTable(backend, BindContext(runtime.device, runtime), **settings)


def test_the_table_says_so_and_strict_refuses():
    table = make_table(CopyingRuntime(), overrides={})
    bound = table.bind(gather_rows)
    assert (bound.implementation, bound.native) == (THROUGH_HOST, False)
    assert table.rows() == [("gather_rows", "", "reference (through the host)")]
    assert table.through_host == table.not_capturable == ("gather_rows",)
    assert bound(torch.arange(4), rows=ids(2)).tolist() == [2]
    overridden = make_table(CopyingRuntime(), overrides={"gather_rows": "reference"})
    assert overridden.bind(gather_rows).implementation == THROUGH_HOST
    with pytest.raises(MissingOpsError, match="gather_rows"):
        make_table(CopyingRuntime(), strict=True, overrides={}).bind(gather_rows)


def test_where_torch_computes_the_reference_runs_on_the_device():
    table = make_table(HostRuntime(), overrides={})
    assert table.bind(gather_rows).implementation == "reference"
    assert table.through_host == () and table.not_capturable == ("gather_rows",)


def test_waits_inside_a_step_are_permitted_and_counted():
    runtime = CopyingRuntime()
    with runtime.sync_guard.forbid("a step is launched"):
        HostPlan(gather_rows, runtime).run(torch.arange(4), ids(2))
    assert runtime.sync_guard.permitted == {"the reference of gather_rows runs on the host": 1}


def test_an_op_with_a_cache_has_to_say_what_it_touches():
    def peek(cache: "PagedCache", slots: "torch.Tensor") -> None:
        """Look."""

    with pytest.raises(ValueError, match=r"op peek: touches does not say which records of \['cache'\]"):
        define_op(tolerance=EXACT, determinism="D2")(peek)
    with pytest.raises(ValueError, match=r"op peek: touches names \['slot'\], which are not arguments"):
        define_op(tolerance=EXACT, determinism="D2", touches={"cache": at_records("slot")})(peek)
    assert "peek" not in defined_ops()


@pytest.mark.parametrize("name", [n for n, op in defined_ops().items() if op.touches])
def test_a_declaration_that_names_too_little_is_found(name):
    """Teeth of the first test: with any one entry of `touches` emptied, some case goes wrong."""
    op = on_device(name)
    for argument, touch in op.touches.items():
        nowhere = replace(touch, at=(lambda args: ids(-1),))
        broken = replace(op, touches={**op.touches, argument: nowhere})
        assert any(_differs(broken, made) for made in small_cases(op)), argument


def _differs(op, made):
    here, there = made.fresh(), made.fresh()
    with poisoned_memory():
        want = op.reference(**here)
        try:
            got = HostPlan(op, CopyingRuntime()).run(**there)
        except (IndexError, RuntimeError):
            return True  # garbage made a shape or an index
    pairs = zip(walk((got, there)), walk((want, here)), strict=True)
    return not all(same_bits(mine, theirs) for (_, mine), (_, theirs) in pairs)


def test_arguments_that_are_only_read_stay_as_they_are():
    args = {"cache": cache(4), "slots": ids(1, 2), "dtype": torch.float32}
    before = snapshot(copied(args))
    HostPlan(kv_gather, CopyingRuntime()).run(**args)
    assert all(torch.equal(bits, before[path]) for path, bits in snapshot(args).items())
