"""Choosing implementations: predicates, priorities, overrides, strict, gates, and the memory a plan asks for."""

from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest
import torch

from deepinfer.ops.backend import Availability, Backend, BindContext
from deepinfer.ops.errors import BackendUnavailableError, MissingOpsError, OpArgumentError
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.index import visible_lens
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.registry import ENTRY_POINT_GROUP, OpTable, find_backend, find_emulated, parse_overrides

BROKEN_ENTRIES = {"absent": "acme_absent:BACKEND", "wrong": "json:JSONDecoder"}


def make_backend() -> Backend:
    return Backend("acme", "cpu", lambda: Availability(True))


def table(backend: Backend, **settings) -> OpTable:
    runtime = HostRuntime()
    batch_invariant = settings.pop("batch_invariant", True)
    return OpTable(backend, BindContext(runtime.device, runtime, batch_invariant), **settings)


def test_highest_priority_whose_predicate_holds_wins() -> None:
    backend = make_backend()

    @backend.implements(visible_lens, when=lambda dims: dims.get("n", 0) > 8, priority=5)
    def wide(positions, ratio):
        return "wide"

    @backend.implements(visible_lens)
    def any_width(positions, ratio):
        return "any"

    ops = table(backend)
    assert ops.bind(visible_lens, n=9)(None, 1) == "wide"
    assert ops.bind(visible_lens, n=8)(None, 1) == "any"
    assert ops.rows() == [("visible_lens", "n=8", "acme.any_width"), ("visible_lens", "n=9", "acme.wide")]
    assert ops.bind(visible_lens, n=9) is ops.bind(visible_lens, n=9)


def test_faster_forms_without_row_invariance_need_to_be_allowed() -> None:
    backend = make_backend()

    @backend.implements(visible_lens, priority=9, batch_invariant=False)
    def fast(positions, ratio):
        return "fast"

    assert table(backend).bind(visible_lens).implementation == "reference"
    assert table(backend, batch_invariant=False).bind(visible_lens).implementation == "acme.fast"


def test_what_is_missing_runs_on_the_reference_and_says_so() -> None:
    bound = table(make_backend()).bind(visible_lens)
    assert not bound.native and bound.implementation == "reference"
    assert bound(torch.tensor([0, 1, 2], dtype=torch.int32), 2).tolist() == [0, 1, 1]


def test_strict_names_every_gap_at_once() -> None:
    backend = make_backend()

    @backend.implements(visible_lens)
    def have(positions, ratio):
        return positions

    ops = table(backend, strict=True)
    ops.bind(visible_lens)
    with pytest.raises(MissingOpsError) as caught:
        ops.bind(rms_norm)
    assert "rms_norm" in caught.value.missing and "sparse_attn" in caught.value.missing
    assert "visible_lens" not in caught.value.missing


def test_overrides_choose_by_name_and_refuse_strangers() -> None:
    backend = make_backend()

    @backend.implements(visible_lens)
    def ours(positions, ratio):
        return positions

    assert table(backend, overrides={"visible_lens": "reference"}).bind(visible_lens).implementation == "reference"
    assert table(backend, overrides={"visible_lens": "acme.ours"}).bind(visible_lens).native
    with pytest.raises(OpArgumentError, match=r"visible_lens=acme.theirs: backend 'acme' has no such one"):
        table(backend, overrides={"visible_lens": "acme.theirs"}).bind(visible_lens)
    assert parse_overrides(" a=b.c , d=e ") == {"a": "b.c", "d": "e"}
    with pytest.raises(OpArgumentError, match="'broken' is not of the form"):
        parse_overrides("a=b,broken")
    with pytest.raises(OpArgumentError, match="override of 'visible_len': no such op"):
        table(backend, overrides={"visible_len": "acme.ours"})


def test_a_kernel_that_fails_its_gate_falls_to_the_next_implementation() -> None:
    backend = make_backend()

    @backend.implements(visible_lens, priority=2)
    def broken(positions, ratio):
        return "broken"

    @backend.implements(visible_lens, priority=1)
    def works(positions, ratio):
        return "works"

    ops = table(backend, gate=lambda implementation: implementation.name != "acme.broken")
    assert ops.bind(visible_lens).implementation == "acme.works"
    assert table(backend, gate=lambda implementation: False).bind(visible_lens).implementation == "reference"


@dataclass
class Counting:
    scratch_bytes: int
    persistent_bytes: int = 0
    capturable: bool = False

    def run(self, positions, ratio, *, scratch=None, persistent=None):
        return scratch, persistent


def test_plans_get_the_memory_they_asked_for() -> None:
    backend = make_backend()

    @backend.implements_plan(visible_lens)
    def plan(dims, ctx):
        return Counting(dims["scratch"], dims["kept"])

    ops = table(backend)
    small, _ = ops.bind(visible_lens, scratch=16, kept=0)(None, 1)
    large, kept = ops.bind(visible_lens, scratch=64, kept=8)(None, 1)
    again, same = ops.bind(visible_lens, scratch=64, kept=8)(None, 1)
    assert small.shape == (16,) and large.shape == (64,) and large.dtype == torch.uint8
    assert large.data_ptr() == again.data_ptr(), "scratch is shared and made once"
    assert kept is same and kept.tolist() == [0] * 8
    assert ops.bind(visible_lens, scratch=0, kept=0)(None, 1) == (None, None)


def test_a_plan_prepares_what_it_reads_best() -> None:
    backend = make_backend()

    @dataclass(frozen=True)
    class Doubling:
        scratch_bytes: int = 0
        persistent_bytes: int = 0
        capturable: bool = True

        def prepare(self, name, value):
            return value * 2 if name == "weight" else value

        def run(self, x, weight, eps, *, out):
            return out.copy_(x * weight)

    @backend.implements_plan(rms_norm, when=lambda dims: dims["n"] == 3)
    def doubling(dims, ctx):
        return Doubling()

    ops, weight = table(backend), torch.tensor([1.0, 2.0, 3.0])
    bound = ops.bind(rms_norm, n=3)
    prepared = bound.prepare("weight", weight)
    assert torch.equal(bound(torch.ones(1, 3), prepared, 0.0), torch.tensor([[2.0, 4.0, 6.0]]))
    assert bound.prepare("x", weight) is weight
    assert ops.bind(rms_norm, n=4).prepare("weight", weight) is weight


def test_unknown_and_unavailable_backends_are_refused_by_name(monkeypatch) -> None:
    with pytest.raises(BackendUnavailableError, match=r"no backend named 'acme'; installed: .*cpu"):
        find_backend("acme")
    gone = Backend("gone", "cpu", lambda: Availability(False, "acme_rt is not installed"))
    old = Backend("old", "cpu", lambda: Availability(True), api_version=0)
    monkeypatch.setattr("deepinfer.ops.registry.discover_backends", lambda: {"gone": gone, "old": old})
    with pytest.raises(BackendUnavailableError, match="cannot run here: acme_rt is not installed"):
        find_backend("gone")
    for find in (find_backend, find_emulated):
        with pytest.raises(BackendUnavailableError, match=r"contract version 0; this release accepts 1"):
            find("old")


def test_a_broken_package_is_listed_with_its_reason_and_harms_no_other(monkeypatch) -> None:
    entries = [EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in BROKEN_ENTRIES.items()]
    entries.append(EntryPoint("cpu", "deepinfer.backends.cpu:BACKEND", ENTRY_POINT_GROUP))
    monkeypatch.setattr("deepinfer.ops.registry.entry_points", lambda group: entries)
    assert find_backend("auto").name == find_backend("cpu").name == "cpu"
    with pytest.raises(BackendUnavailableError, match=r"entry point absent = acme_absent:BACKEND cannot be imported"):
        find_backend("absent")
    with pytest.raises(BackendUnavailableError, match=r"entry point wrong = json:JSONDecoder is a type, not a Backend"):
        find_backend("wrong")
