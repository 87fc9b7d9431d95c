"""The benchmark of ops: its arithmetic, its table, and that operands are what the contracts ask for."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import op_lines
import op_work
import pytest
import torch
from op_lines import Line, Roofs
from op_work import Maker, Peer, Sizes, Work, attention, index, products, sampling, steps
from torch._subclasses.fake_tensor import FakeTensorMode

from deepinfer.ops.backend import BindContext
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.contract import check_arguments, static_dims
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.kv import kv_norm_rope_store
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.registry import OpTable, find_backend
from deepinfer.ops.step import rewind
from deepinfer.ops.trees import tensors_of

# by its place: its name is also that of a source folder
_SPEC = importlib.util.spec_from_file_location("ops_benchmark", Path(op_lines.__file__).with_name("ops.py"))
ops = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(ops)

ROOFS = Roofs.of("NVIDIA H200", 4000.0, 800.0)


def line(us=100.0, flops=0.0, num_bytes=0.0, *, invariant=True, op="op", work="w", roofs=ROOFS):
    return Line.of(work, op, "8 x 8", us, invariant=invariant, flops=flops, num_bytes=num_bytes, roofs=roofs)


def test_a_call_is_bound_by_what_takes_longer_at_the_measured_roofs():
    product = line(flops=40e9, num_bytes=40e6)  # 50 us of arithmetic, 10 us of memory
    assert (product.bound, product.tflops, product.gbs) == ("arithmetic", 400.0, 400.0)
    assert product.share == pytest.approx(0.5) and product.sheet_share == pytest.approx(400 / 989)
    copy = line(flops=8e9, num_bytes=240e6)
    assert copy.bound == "memory" and copy.share == pytest.approx(0.6) and copy.sheet_share == pytest.approx(0.5)


def test_a_device_without_a_datasheet_has_no_share_of_one():
    made = line(num_bytes=1e6, roofs=Roofs.of("somebody's chip", 100.0, 1.0))
    assert made.sheet_share == 0.0 and "datasheet" not in str(made)
    assert line(num_bytes=1e6, roofs=Roofs.of("nothing", 0.0, 0.0)).share == 0.0


def test_the_table_has_both_invariances_and_the_peers_in_one_row():
    lines = [
        line(100.0, 40e9, op="b.kernel"),
        line(80.0, 40e9, op="b.fast", invariant=False),
        line(90.0, 40e9, op="torch.mm", invariant=None),
        line(70.0, 40e9, op="torch._scaled_mm", invariant=None),
        line(10.0, 0.0, 20e6, op="b.rows", work="v"),
    ]
    head, rule, first, second = op_lines.markdown(lines).splitlines()
    assert head.count("|") == rule.count("|") == first.count("|") == second.count("|") == 9
    assert first == (
        "| `b.kernel` | 8 x 8 | 100.0 | 80.0 | 400 TFLOP/s | 50% of arithmetic | 40% | "
        "torch.mm 90.0; torch._scaled_mm 70.0 |"
    )
    assert second == "| `b.rows` | 8 x 8 | 10.0 | the same | 2000 GB/s | 50% of memory | 42% |  |"


def test_a_run_that_only_times_variant_forms_says_so():
    assert "| the same | 80.0 |" in op_lines.markdown([line(80.0, 40e9, invariant=False)])


def small_family(make):
    x, weight = make.plain(4, 64), torch.ones(64)

    def broken(**args):
        raise RuntimeError("this torch has none")

    peers = [
        Peer("torch.clone", torch.clone, lambda: [{"input": x}]),
        Peer("a peer that is not there", broken, lambda: [{}]),
    ]
    yield Work(rms_norm, "4 x 64", [{"x": x, "weight": weight, "eps": 1e-6}], 0.0, 4.0 * x.numel(), peers)
    yield Work(rms_norm, "2 x 64", [{"x": x[:2], "weight": weight, "eps": 1e-6}], 0.0, 2.0 * x.numel())


@pytest.fixture
def small(monkeypatch):
    """One family of small operands, on the CPU."""
    monkeypatch.setattr(ops, "FAMILIES", {small_family: ("rms_norm",)})
    return find_backend("cpu")


def test_an_op_is_timed_once_where_both_tables_choose_the_same(small, capsys):
    found = list(ops.OpBench(small, [True, False], peers=True).lines(["rms_*"]))
    assert [(x.op, x.shape, x.invariant) for x in found] == [
        ("cpu.rms_norm", "4 x 64", True),
        ("torch.clone", "4 x 64", None),
        ("cpu.rms_norm", "2 x 64", True),
    ]
    assert all(x.us > 0 and x.bound == "memory" for x in found)
    assert "a peer that is not there" in capsys.readouterr().out


def test_a_variant_form_gets_a_line_of_its_own(small):
    (best,) = (i for i in small.implementations if i.op is rms_norm)
    fast = replace(best, name="cpu.fast_norm", batch_invariant=False, priority=best.priority + 1)
    backend = replace(small, implementations=[*small.implementations, fast])
    found = list(ops.OpBench(backend, [True, False], peers=False).lines(["*"], "4 x*"))
    assert [(x.op, x.invariant) for x in found] == [("cpu.rms_norm", True), ("cpu.fast_norm", False)]


def test_what_was_measured_is_written_down(small, tmp_path, monkeypatch, capsys):
    as_json, as_table = tmp_path / "ops.json", tmp_path / "ops.md"
    monkeypatch.setattr(sys, "argv", ["ops.py", "--json", str(as_json), "--markdown", str(as_table), "--shape", "2*"])
    ops.main()
    facts = json.loads(as_json.read_text())
    assert [x["shape"] for x in facts["lines"]] == ["2 x 64"] and facts["copy_gbs"] > 0
    assert "| `cpu.rms_norm` | 2 x 64 |" in as_table.read_text()
    for words, told in (
        (["--op", "rms_norm,no_such_op"], "no op fits 'no_such_op'; there are rms_norm"),
        (["--backend", "no_such_backend"], "no_such_backend"),
        (["--shape", "no such shape"], "no operands of"),
    ):
        monkeypatch.setattr(sys, "argv", ["ops.py", *words])
        with pytest.raises(SystemExit) as ended:
            ops.main()
        assert told in f"{ended.value} {capsys.readouterr().err}"


def test_an_op_whose_runs_differ_is_named_and_not_timed(small, monkeypatch, capsys):
    (best,) = (i for i in small.implementations if i.op is rms_norm)
    count = iter(range(1000))

    class Racy:
        scratch_bytes = persistent_bytes = 0
        capturable = True

        def run(self, x, weight, eps, out=None):
            return x + (next(count) == 2)

    racy = replace(best, name="cpu.racy_norm", bind=lambda dims, ctx: Racy(), priority=best.priority + 1)
    monkeypatch.setattr(ops, "find_backend", lambda name: replace(small, implementations=[racy]))
    monkeypatch.setattr(sys, "argv", ["ops.py", "--shape", "4*", "--peers", "off"])
    with pytest.raises(SystemExit, match=r"runs of the same operands differ: cpu.racy_norm 4 x 64"):
        ops.main()
    assert "cpu.racy_norm" in capsys.readouterr().out


def test_what_an_op_writes_in_place_must_repeat_as_its_results_do():
    count = iter(range(1000))

    class Racy:
        op = kv_norm_rope_store

        def __call__(self, kv, cache):
            cache[2] = next(count)
            return kv + 1

    assert not ops.repeats(Racy(), {"kv": torch.ones(3), "cache": torch.zeros(4)})
    count = iter([5] * 1000)
    assert ops.repeats(Racy(), {"kv": torch.ones(3), "cache": torch.zeros(4)})


def test_runs_of_an_op_begin_with_what_it_writes_in_place_as_it_was():
    class Bound:
        op = rewind

        def __call__(self, values, **args):
            values -= 1

    values = torch.tensor([5, 6])
    assert ops.repeats(Bound(), {"values": values})
    assert values.tolist() == [5, 6]


def test_an_op_that_no_graph_holds_is_called_for_every_time():
    runtime, captured = HostRuntime(), []

    def capture(step):
        captured.append(step)
        return step

    runtime.capabilities, runtime.capture = replace(runtime.capabilities, graphs=True), capture
    assert ops.time_calls(runtime, [{}], lambda: None, capturable=False) > 0 and not captured
    assert ops.time_calls(runtime, [{}], lambda: None) > 0 and len(captured) == 1


def maker(sizes=None):
    context = BindContext(torch.device("cpu"), HostRuntime(), max_tokens=8192)
    return Maker(OpTable(find_backend("cpu"), context, overrides={}), sizes)


def name_of(family):
    return f"{family.__module__.rpartition('.')[2]}.{family.__name__}"


def check_contract(work):
    arguments = work.op.signature.bind(**work.calls[0])
    arguments.apply_defaults()
    check_arguments(work.op.name, work.op.arguments, arguments.arguments)
    dims = static_dims(work.op.dims, work.calls[0])
    assert all(isinstance(size, int | str) for size in dims.values()), dims
    assert work.num_bytes > 0 and work.flops >= 0


def test_every_op_is_timed():
    names = [name for family in op_work.FAMILIES.values() for name in family]
    assert sorted(names) == sorted(defined_ops())


@pytest.mark.parametrize("family", [f for f in op_work.FAMILIES if f is not products.experts], ids=name_of)
def test_operands_are_what_contracts_ask_for(family):
    """Of every family at its real sizes, without the memory; experts read who has rows, which needs real numbers."""
    names = set()
    with FakeTensorMode():
        for work in family(maker()):
            check_contract(work)
            names.add(work.op.name)
    assert names == set(op_work.FAMILIES[family])


SMALL = Sizes(few=3, many=20, requests=2, vocabulary=70, experts=7, table_rows=50, image=33, small_image=9)
LARGE = (
    products.dense,
    products.grouped_output,
    products.plain_dense,
    products.experts,
    attention.attend,
    index.choose,
)
"""Families whose products take a host too long."""


@pytest.mark.parametrize("family", [f for f in op_work.FAMILIES if f not in LARGE], ids=name_of)
def test_operands_stay_valid_from_call_to_call(family):
    """References look at every index: one that is out of bounds is an error."""
    for work in family(maker(SMALL)):
        check_contract(work)
        args = work.calls[0]
        written = tensors_of([args[name] for name in work.op.mutates])
        for _ in range(20 if written else 1):
            results = tensors_of(work.op(**args))
        assert results or written
        assert not any(x.isnan().any() for x in (*results, *written))
        for peer in work.peers:
            peer.run(**peer.calls()[0])


@pytest.mark.parametrize("family", [steps.correction, steps.histories, steps.numbers])
def test_corrections_of_a_step_change_nothing_more_once_they_are_made(family):
    for work in family(maker(SMALL)):
        written = tensors_of([work.calls[0][name] for name in work.op.mutates])
        work.op(**work.calls[0])
        once = [x.clone() for x in written]
        work.op(**work.calls[0])
        assert all(map(torch.equal, once, written))


def test_all_drafts_are_kept_so_that_every_row_of_a_verification_counts():
    for work in sampling.verified(maker(SMALL)):
        num_emitted, tokens = work.op(**work.calls[0])
        assert num_emitted.tolist() == [6, 6] and (tokens >= 0).all()
