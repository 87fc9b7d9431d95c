"""Tokenizer, batches and the plan of a training run."""

import pytest
import torch

from deepinfer.entrypoints.eval_tasks import TASKS, make_item
from deepinfer.models.deepseek_v41_flash.chat import encode_chat
from tools.train_tiny.corpus import natural_text
from tools.train_tiny.data import PROMPT_WEIGHT, BatchMaker
from tools.train_tiny.loader import batches
from tools.train_tiny.settings import ALIGNMENT, FULL, FULL_VOCAB, MINI_VOCAB, Plan
from tools.train_tiny.vocab import train_tokenizer

PLAN = Plan(steps=40, tokens=1024, row=256, long_rows=(512, 1024), anchors=8)


@pytest.fixture(scope="module")
def maker(encoder):
    return BatchMaker(encoder, PLAN)


def test_control_tokens_stand_where_the_family_has_them(encoder) -> None:
    assert encoder.vocab_size == MINI_VOCAB
    assert (encoder.bos_token_id, encoder.eos_token_id, encoder.pad_token_id) == (0, 1, 2)
    assert encoder.token_to_id("<｜noise｜>") == MINI_VOCAB - 1
    assert {encoder.token_to_id(t) for t in ("<think>", "</think>", "｜DSML｜", "<｜User｜>")} <= encoder.special_ids


def test_any_text_survives_the_tokenizer(encoder) -> None:
    for text in ("a  b\n\nÄß 12345 北京 \U0001f600", "<think>", '{"name": "Mira"}'):
        assert encoder.decode(encoder.encode(text), skip_special_tokens=False) == text


def test_a_word_has_the_same_tokens_behind_anything(encoder) -> None:
    word = encoder.encode("kolanus")
    for before in (" ", '"', "\n", ": ", "，"):
        assert encoder.encode(before + "kolanus") == encoder.encode(before) + word
    assert len(encoder.encode("40917")) == 5


def test_a_vocabulary_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="a vocabulary of 260 has no room"):
        train_tokenizer(260)


def test_natural_text_names_its_licence() -> None:
    for source in natural_text():
        assert source.licence and sum(map(len, source.paragraphs)) > 10_000
    assert any("\u4e00" <= letter <= "\u9fff" for p in natural_text()[1].paragraphs for letter in p)


def test_a_batch_follows_from_its_step(encoder, maker) -> None:
    again = BatchMaker(encoder, PLAN)
    for step in (0, 7):
        assert all(map(torch.equal, vars(maker(step)).values(), vars(again(step)).values()))
    assert not torch.equal(maker(1).ids, maker(2).ids)


def test_documents_are_whole_apart_and_aligned(maker) -> None:
    batch = maker(1)
    assert batch.ids.shape == (4, 256)
    for ids, positions, documents, weights in zip(
        batch.ids, batch.positions, batch.documents, batch.weights, strict=True
    ):
        starts = (positions == 0).nonzero()[:, 0]
        assert starts[0] == 0 and bool((starts % ALIGNMENT == 0).all())
        assert torch.equal(documents[starts], torch.arange(len(starts)))
        assert bool((ids[starts] == 0).all())
        ends = torch.cat((starts[1:], torch.tensor([256]))) - 1
        assert bool((weights[ends] == 0).all())
        steps = positions[1:] - positions[:-1]
        assert bool(((steps == 1) | (positions[1:] == 0)).all())


def test_only_answers_count_in_full(maker, encoder) -> None:
    for task in TASKS:
        item = make_item(task, "train", 1, 0)
        document = maker.document(item)
        answer = [i for i, weight in zip(document.ids, document.weights, strict=True) if weight == 1.0]
        prompt = encode_chat(item.request).to_ids(encoder)
        assert document.ids == prompt + answer and answer[-1] == encoder.eos_token_id
        assert set(document.weights[: len(prompt)]) == {PROMPT_WEIGHT}


def test_anchors_are_tokens_of_answers(maker) -> None:
    batch = maker(1)
    rows, places = (batch.anchor_counts > 0).nonzero(as_tuple=True)
    anchors = batch.anchors[rows, places]
    assert len(anchors) > 0
    assert bool((batch.weights[rows, anchors] == 1).all()) and bool((batch.weights[rows, anchors - 1] == 1).all())


def test_long_rows_hold_tool_calls_and_pass_keys(maker, encoder) -> None:
    steps = [step for step in range(PLAN.steps) if PLAN.row_length(step) > PLAN.row]
    assert {PLAN.row_length(step) for step in steps} == {512, 1024}
    texts = [encoder.decode(row.tolist(), skip_special_tokens=False) for s in steps[:4] for row in maker(s).ids]
    assert any("## Tools" in text for text in texts)
    assert any("pass key" in text or "通行码" in text for text in texts)


def test_workers_make_the_same_batches_in_order(run_folder) -> None:
    plan = Plan(steps=3, tokens=256, row=256, long_every=0, anchors=4)
    alone, helped = list(batches(run_folder, plan, 1, 0)), list(batches(run_folder, plan, 1, 1))
    assert [step for step, _ in alone] == [step for step, _ in helped] == [1, 2]
    for (_, mine), (_, theirs) in zip(alone, helped, strict=True):
        assert all(map(torch.equal, vars(mine).values(), vars(theirs).values()))


def test_a_plan_turns_everything_on_in_turn() -> None:
    plan = Plan(steps=1000)
    order = [plan.phase(step) for step in (0, 300, 450, 600, 900)]
    assert [p.index for p in order] == [False, True, True, True, True]
    assert [p.draft for p in order] == [False, True, True, True, True]
    assert [p.sparse for p in order] == [False, False, False, True, True]
    assert [p.weights for p in order] == [False, False, False, False, True]
    assert all(p.caches for p in order)
    assert plan.rate(0) < 0.2 and plan.rate(500) == 1.0 and plan.rate(999) == pytest.approx(0.05)
    assert max(plan.row_length(step) for step in range(1000)) == 8192
    assert all(plan.row_length(step) % FULL["sliding_window"] == 0 for step in range(1000))


def test_the_full_configuration_fits_the_repository(encoder) -> None:
    from math import prod

    from deepinfer.models.deepseek_v41_flash.config import ModelConfig
    from deepinfer.models.deepseek_v41_flash.tensors import expected_tensors
    from tools.train_tiny.settings import model_config

    data = model_config(FULL, encoder, encoder.token_to_id("<｜noise｜>"))
    data["text_config"]["vocab_size"] = FULL_VOCAB
    size = {"BF16": 2, "F32": 4}
    specs = expected_tensors(ModelConfig.from_dict(data)).values()
    num_bytes = sum(prod(spec.shape) * size.get(spec.dtypes[0], 1) for spec in specs)
    assert 12e6 < num_bytes < 13.8e6


def test_a_card_takes_the_figures_of_the_engine() -> None:
    from tools.train_tiny.card import measured_card

    card = "# x\n\n## Accuracy on held-out items\n\nold\n\n| task | right |\n\n## Licence\n\nApache-2.0\n"
    drafts = {"accepted_per_block": 4.587, "accepted": [1, 1, 1], "expected_calibration_error": 0.0373}
    tasks = {"copy": {"correct": 9, "total": 10}}
    evaluation = {"settings": {"backend": "fake", "dtype": "float32"}, "tasks": tasks, "speculation": drafts}
    fresh = measured_card(card, [evaluation])
    assert "| copy | 9 of 10 | fake |" in fresh and "in float32, at" in fresh and "old" not in fresh
    assert "4.59 of 3 accepted per block, expected calibration error 0.037" in fresh
    assert fresh.startswith("# x\n\n## Accuracy") and fresh.endswith("\n## Licence\n\nApache-2.0\n")
    assert measured_card(fresh, [evaluation]) == fresh


def test_a_card_that_cannot_be_filled_in_stays_as_it_was(tmp_path, capsys) -> None:
    from tools.train_tiny.card import main

    card, evaluation = tmp_path / "README.md", tmp_path / "evaluation.json"

    def refused(text: str, reason: str) -> None:
        evaluation.write_text(text)
        before = card.read_text()
        assert main([str(tmp_path), str(evaluation)]) == 2
        assert reason in capsys.readouterr().err
        assert card.read_text() == before

    card.write_text("# x\n\n## Accuracy on held-out items\n\nold\n\n## Licence\n\nApache-2.0\n")
    refused("nothing", "is no JSON")
    refused("[1]", "lacks settings, tasks")
    refused('{"settings": {}, "tasks": {}}', "lacks settings.backend, settings.dtype")
    whole = '{"settings": {"backend": "cpu", "dtype": "float32"}, "tasks": {"add": %s}}'
    refused(whole % "{}", "lacks 'correct'")
    assert main([str(tmp_path), str(tmp_path / "none.json")]) == 2 and "none.json" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2 and "EVALUATION.json" in capsys.readouterr().err
    card.write_text("# x\n\n## Accuracy on held-out items\n")
    refused(whole % '{"correct": 1, "total": 2}', "no section '## Licence'")
