"""Training: losses fall, a resume is no difference, and the command does what it says."""

import json
from dataclasses import replace

import pytest
import torch

from deepinfer import LLM
from deepinfer.core.tokenizer import TOKENIZER_FILE
from tools.train_tiny.__main__ import main
from tools.train_tiny.data import BatchMaker
from tools.train_tiny.functions import Functions, probabilities, samples, sinkhorn
from tools.train_tiny.optim import orthogonal
from tools.train_tiny.settings import Plan
from tools.train_tiny.trainer import DivergedError, ResumeError, StepReport, Trainer

PLAN = Plan(steps=6, tokens=256, row=128, long_every=0, anchors=8, index_from=0.3, draft_from=0.3, sparse_from=0.5)


@pytest.fixture(scope="module")
def maker(encoder):
    return BatchMaker(encoder, PLAN)


@pytest.fixture
def make_trainer(config, encoder):
    def make(plan=PLAN):
        return Trainer(config, encoder, plan, device=torch.device("cpu"), dtype=torch.float32)

    return make


def everything(**shares):
    """A plan in which all is on from the first step."""
    on = {"index_from": 0.0, "draft_from": 0.0, "sparse_from": 0.0, "weights_from": 0.0}
    return replace(PLAN, steps=100, warmup=0.001, **(on | shares))


def test_a_memorised_batch_loses_its_loss(make_trainer, maker) -> None:
    trainer, batch = make_trainer(replace(PLAN, steps=100, warmup=0.001)), maker(0)
    texts = [float(trainer.train(batch).values[0]) for _ in range(3)]
    assert texts[2] < texts[1] < texts[0] and texts[2] < 0.85 * texts[0]


def test_every_part_learns_when_all_is_on(make_trainer, maker) -> None:
    trainer, batch = make_trainer(everything()), maker(0)
    before = {name: p.detach().clone() for name, p in trainer.store.named()}
    reports = [trainer.train(batch) for _ in range(5)]  # the draft follows a backbone that moves, so it begins late
    text, _, index, draft, _ = (reports[4].values / reports[0].values).tolist()
    assert text < 0.9 and index < 0.95 and draft < 0.95
    still = [name for name, p in trainer.store.named() if torch.equal(p, before[name])]
    # gates at exactly even load may stay
    assert not [name for name in still if not name.endswith(("gate.bias", "gate.bias_vl"))], still
    assert int(reports[0].counts[2]) > 0 and "draft" in reports[0].line() and "index" in reports[0].line()


def test_the_indexer_learns_from_distillation_alone_and_teaches_nothing_else(make_trainer, maker) -> None:
    from tools.train_tiny.losses import losses

    trainer = make_trainer(everything(draft_from=1.0))
    batch = maker(0)
    losses(trainer.backbone, batch, batch, trainer.phase).total.backward()
    with_index = {name: None if p.grad is None else p.grad.clone() for name, p in trainer.store.named()}
    trainer.store.zero_grad(set_to_none=True)
    losses(trainer.backbone, batch, batch, replace(trainer.phase, index=False)).total.backward()
    for name, p in trainer.store.named():
        if ".indexer." in name:
            assert with_index[name] is not None and float(with_index[name].abs().max()) > 0, name
            assert p.grad is None, name
        elif p.grad is not None:
            assert torch.allclose(p.grad, with_index[name], atol=1e-7), name


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_draft_teaches_the_backbone_the_share_that_the_plan_gives(make_trainer, maker, share) -> None:
    from tools.train_tiny.losses import losses

    trainer = make_trainer(everything(draft_gradient=share))
    batch = maker(0)
    grads = []
    for drafts in (False, True):
        trainer.store.zero_grad(set_to_none=True)
        losses(trainer.backbone, batch, batch, replace(trainer.phase, draft=drafts)).total.backward()
        grads.append({name: p.grad for name, p in trainer.store.named() if not name.startswith("mtp.")})
        drafted = [
            p.grad is not None for name, p in trainer.store.named() if name.startswith("mtp.") and "bias" not in name
        ]
        assert all(drafted) if drafts else not any(drafted)
    same = [torch.allclose(grad, grads[1][name], atol=1e-7) for name, grad in grads[0].items() if grad is not None]
    assert all(same) if share == 0 else not all(same)
    assert torch.allclose(
        grads[0]["head.weight"], grads[1]["head.weight"], atol=1e-7
    )  # shared with the draft, not taught


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(make_trainer, maker, tmp_path) -> None:
    whole = make_trainer()
    for step in range(PLAN.steps):
        whole.train(maker(step))
    first = make_trainer()
    for step in range(3):
        first.train(maker(step))
    first.save(tmp_path)
    second = make_trainer()
    second.resume(tmp_path)
    assert second.step == 3
    for step in range(3, PLAN.steps):
        second.train(maker(step))
    for name, p in whole.store.named():
        assert torch.equal(p, second.store.raw(name)), name


def test_parts_of_a_batch_sum_to_the_whole(make_trainer, maker, monkeypatch) -> None:
    one, two = make_trainer(everything()), make_trainer(everything())
    whole = one.train(maker(0))
    monkeypatch.setattr("tools.train_tiny.losses._LARGEST_AREA", 128 * 128)
    halves = two.train(maker(0))
    assert torch.equal(whole.counts, halves.counts)
    assert torch.allclose(whole.values[[0, 3, 4]], halves.values[[0, 3, 4]], rtol=1e-4)


def test_long_rows_taken_in_pieces_give_the_same_gradients(make_trainer, maker, monkeypatch) -> None:
    from tools.train_tiny.losses import losses

    trainer, batch = make_trainer(everything()), maker(0)
    found = []
    for pieces in (512, 32):
        monkeypatch.setattr("tools.train_tiny.attention._QUERIES_AT_ONCE", pieces)
        trainer.store.zero_grad(set_to_none=True)
        result = losses(trainer.backbone, batch, batch, trainer.phase)
        result.total.backward()
        found.append((result.values, {name: p.grad for name, p in trainer.store.named() if p.grad is not None}))
    (values, grads), (piecewise, piecewise_grads) = found
    assert torch.allclose(values, piecewise, rtol=1e-4)
    for name, grad in grads.items():
        assert torch.allclose(grad, piecewise_grads[name], rtol=1e-2, atol=1e-4 * float(grad.abs().max()) + 1e-9), name


@pytest.mark.parametrize("name", sorted(vars(Functions())))
def test_a_function_that_may_be_compiled_is_compiled_whole(name) -> None:
    function, arguments = getattr(Functions(), name), samples(torch.device("cpu"))[name]
    draw = torch.Generator().manual_seed(0)
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and argument.requires_grad:
            argument.data.copy_(torch.randn(argument.shape, generator=draw))
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    wants, finds = function(*arguments), compiled(*arguments)
    for want, found in zip(wants, finds, strict=True) if isinstance(wants, tuple) else ((wants, finds),):
        assert want.abs().max() > 0 and torch.allclose(want, found, atol=1e-6)


def test_streams_are_mixed_by_nearly_doubly_stochastic_matrices() -> None:
    logits = torch.randn(7, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(sinkhorn(logits, 20, 1e-6).sum(1), torch.ones(7, 4), atol=1e-4)


def test_probabilities_leave_the_share_of_the_sink_out() -> None:
    scores, seen = torch.randn(1, 2, 3, 5), torch.rand(1, 1, 3, 5) > 0.3
    seen[0, 0, 1] = False
    sink = torch.tensor([0.3, -2.0])
    columns = torch.cat((scores.masked_fill(~seen, -torch.inf), sink[:, None, None].expand(1, 2, 3, 1)), -1)
    assert torch.allclose(probabilities(scores, seen, sink, 1.0), columns.softmax(-1)[..., :-1], atol=1e-6)


def test_a_machine_that_cannot_compile_trains_all_the_same(config, encoder, maker, monkeypatch, capsys) -> None:
    def broken(*_):
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr(torch, "compile", lambda function: broken)
    for name in ("automatic_dynamic_shapes", "recompile_limit", "suppress_errors"):
        monkeypatch.setattr(torch._dynamo.config, name, getattr(torch._dynamo.config, name))
    trainer = Trainer(config, encoder, PLAN, device=torch.device("cpu"), dtype=torch.float32, compiled=True)
    assert "gated runs without compilation, slower: RuntimeError: no compiler here\n" in capsys.readouterr().out
    assert bool(torch.isfinite(trainer.train(maker(0)).values).all())


def test_a_state_of_another_plan_is_refused(make_trainer, tmp_path) -> None:
    make_trainer().save(tmp_path)
    with pytest.raises(ResumeError, match="its plan differs in steps"):
        make_trainer(replace(PLAN, steps=7)).resume(tmp_path)


def test_bfloat16_trains_alike(config, encoder, maker) -> None:
    values = []
    for dtype in (torch.float32, torch.bfloat16):
        trainer = Trainer(config, encoder, everything(), device=torch.device("cpu"), dtype=dtype)
        values.append([trainer.train(maker(0)).values for _ in range(2)][1])
    single, half = values
    assert torch.allclose(single[0], half[0], rtol=0.03)
    assert torch.allclose(single[3], half[3], rtol=0.1)  # a sum over the draft's places, after an update in each dtype


def test_a_loss_that_is_no_number_stops_the_run(make_trainer) -> None:
    trainer = make_trainer()
    trainer.step = 5
    report = StepReport(torch.tensor([1.0, float("nan"), 0, 0, 0]), torch.zeros(4))
    with pytest.raises(DivergedError, match="step 4"):
        trainer.check(report)


@pytest.mark.parametrize("shape", [(3, 16, 40), (40, 16), (16, 16)])
def test_muon_makes_singular_values_even(shape) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(x))
    assert float(values.min()) > 0.5 and float(values.max()) < 1.3
    assert torch.equal(orthogonal(torch.zeros(shape)), torch.zeros(shape))


def test_the_command_trains_stops_resumes_and_exports(run_folder, tmp_path, capsys) -> None:
    out, target = tmp_path / "run", tmp_path / "model"
    out.mkdir()
    (out / TOKENIZER_FILE).write_bytes((run_folder / TOKENIZER_FILE).read_bytes())
    fixed = ("--size", "mini", "--device", "cpu", "--probe-items", "1", "--log-every", "1", "--save-every", "0")
    plan = ("--steps", "2", "--tokens", "256", "--row", "128", "--long-every", "0")
    arguments = ["--out", str(out), "--export", str(target), *fixed]
    assert main([*arguments, *plan, "--minutes", "0"]) == 0
    assert "step 1 of 2" in capsys.readouterr().out
    assert main([*arguments, *plan]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main([*arguments, "--resume", "--steps", "9"]) == 2
    assert "steps 9 (it began with 2)" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0
    assert "step 2 of 2" in capsys.readouterr().out
    probes = [json.loads(line) for line in (out / "probes.jsonl").read_text().splitlines()]
    assert [probe["step"] for probe in probes] == [1, 2] and set(probes[0]) >= {"copy", "add", "lookup"}
    card = (target / "README.md").read_text()
    assert "State: complete" in card and "PSF-2.0" in card and "| copy | 0.0 % |" in card
    with LLM(str(target), backend="cpu", dtype="float32", max_model_len=64) as llm:
        assert llm.generate("What is 1 + 2?")[0].error is None


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (("--steps", "0"), "--steps must be at least 1, got 0"),
        (("--row", "100"), "--row must be a multiple of the model's window of 16, got 100"),
        (("--minutes", "nan"), "--minutes must be at least 0, got nan"),
        (("--log-every", "0"), "--log-every must be at least 1"),
        (("--device", "abacus"), "--device 'abacus' cannot be used here"),
    ],
)
def test_options_that_no_run_can_begin_with_leave_nothing_behind(tmp_path, capsys, option, reason) -> None:
    assert main(["--out", str(tmp_path / "run"), "--size", "mini", *option]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
