"""The benchmark of whole layers: which layers stand for a model, what random weights are like, and a run of it."""

import json
import math
import sys
from dataclasses import replace

import layers
import pytest
import random_model
import torch

from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny
from deepinfer.ops.formats import QTensor
from deepinfer.ops.numeric import plain


@pytest.fixture(scope="module")
def tiny_config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny(folder)
    return folder / "config.json"


@pytest.fixture(scope="module")
def released():
    return random_model.read_config(random_model.RELEASED)


@pytest.mark.parametrize("count", [3, 5, 6, 8, 12, 40])
def test_chosen_layers_are_of_every_kind_and_find_what_they_read(released, count):
    text = released["text_config"]
    chosen = random_model.choose_layers(text, count)
    assert chosen == sorted(set(chosen)) and len(chosen) == count
    assert {0, 2, 20} <= set(chosen)  # window only, the first source of pairs, the source of single entries
    config = random_model.cut_config(released, count).text
    assert config.num_layers == count and config.hidden_size == 5120 and config.n_routed_experts == 384
    assert [config.compress_ratios[i] for i in range(count)] == [text["compress_ratios"][layer] for layer in chosen]
    assert [chosen[i] for i in config.kv_source_layer_ids] == [x for x in (2, 8, 14, 20) if x in chosen]
    assert config.dspark_target_layer_ids == tuple(range(count - 3, count))
    for place, layer in enumerate(chosen):
        ratio = text["compress_ratios"][layer]
        before = [i for i in config.kv_source_layer_ids if i <= place]
        assert not ratio or config.compress_ratios[before[-1]] == ratio


def test_six_layers_hold_reuse_and_reindex(released):
    assert random_model.choose_layers(released["text_config"], 6) == [0, 2, 3, 20, 21, 24]


@pytest.mark.parametrize("count", [2, 41])
def test_other_counts_are_refused(released, count):
    with pytest.raises(ValueError, match=f"3 to 40 of them, not {count}"):
        random_model.choose_layers(released["text_config"], count)


def test_random_weights_are_numbers_of_the_right_spread(tiny_config):
    config = random_model.cut_config(random_model.read_config(tiny_config), 5)
    checkpoint = random_model.RandomCheckpoint(config, torch.device("cpu"))
    for name, rounds in {"layers.1.attn.wq_b": 32, "layers.1.ffn.experts.0.w1": 1}.items():
        codes, scale = checkpoint.get(f"{name}.weight"), checkpoint.get(f"{name}.scale").repeat_interleave(rounds, 0)
        fmt = "mxfp8" if codes.dtype == torch.float8_e4m3fn else "mxfp4"
        values = plain(QTensor(codes.view(torch.uint8), scale[: codes.shape[0]], fmt), torch.float32)
        assert values.isfinite().all()
        spread = float((values.shape[1] * values.square().mean()).sqrt())
        assert 0.4 < spread < 2.5, f"{name}: {spread}"
    for name, spec in checkpoint.tensors.items():
        assert tuple(checkpoint.get(name).shape) == spec.shape, name


def run(tiny_config, *arguments):
    return list(
        layers.measure(layers.parse(["--config", str(tiny_config), "--steps", "3", "--max-rows", "64", *arguments]))
    )


def test_a_run_on_the_cpu_measures_what_was_asked_for(tiny_config, tmp_path, monkeypatch, capsys):
    output = tmp_path / "lines.json"
    arguments = ["--config", str(tiny_config), "--layers", "5", "--batches", "1,3", "--contexts", "100", "--steps", "3"]
    monkeypatch.setattr(
        sys, "argv", ["layers.py", *arguments, "--prefill", "70", "--max-rows", "64", "--json", str(output)]
    )
    layers.main()
    facts = json.loads(output.read_text())
    lines = facts["lines"]
    assert [(x["kind"], x["batch"], x["context"], x["speculation"]) for x in lines] == [
        ("prefill", 2, 70, False),
        ("decode", 3, 100, False),
        ("decode", 1, 100, False),
        ("decode", 3, 100, True),
        ("decode", 1, 100, True),
    ]
    for line in lines:
        assert line["step_us"] > 0 and line["captured"] == 0.0  # the CPU has no graphs
        if line["kind"] == "decode" and not line["speculation"]:
            assert math.isclose(line["tokens_per_s"] * line["step_us"], 1e6 * line["batch"], rel_tol=1e-6)
    printed = capsys.readouterr().out
    assert "batch 3, context 100, graphs: drafts pay from" in printed and "5 measurements, 5 layers" in printed


def test_steps_are_replayed_where_graphs_are_on(tiny_config):
    lines = run(
        tiny_config, "--backend", "fake", "--layers", "3", "--batches", "2", "--contexts", "40", "--prefill", "",
        "--speculation", "off", "--graphs", "on,off",
    )  # fmt: skip
    assert [(line.graphs, line.captured) for line in lines] == [(True, 1.0), (False, 0.0)]


def test_nothing_new_is_begun_when_time_is_over(tiny_config):
    said = run(
        tiny_config, "--layers", "3", "--batches", "1,2", "--contexts", "40", "--prefill", "70", "--seconds", "0",
        "--speculation", "off",
    )  # fmt: skip
    assert [str(one) for one in said] == [
        "prefill, context 70: not measured, time was over",
        "decode, batch 2, context 40: not measured, time was over",
        "decode, batch 1, context 40: not measured, time was over",
    ]


def test_steps_with_drafts_are_replayed_and_draw_until_they_are_counted(tiny_config):
    lines = run(
        tiny_config, "--backend", "fake", "--layers", "3", "--batches", "1,2", "--contexts", "40", "--prefill", "",
        "--speculation", "on", "--temperature", "1.0", "--steps", "8",
    )  # fmt: skip
    assert [(line.batch, line.captured, line.eager) for line in lines] == [(2, 1.0, ""), (1, 1.0, "")]
    assert all(1.0 <= line.drawn <= 6.0 for line in lines)


def test_what_does_not_fit_into_memory_is_said_and_the_rest_measured(tiny_config, monkeypatch):
    own = layers.CacheSizes.of

    def sizes(spec, config, *args, **kwargs):
        found = own(spec, config, *args, **kwargs)
        return replace(found, fixed_bytes=1 << 60) if config.max_num_seqs > 1 else found

    monkeypatch.setattr(layers.CacheSizes, "of", sizes)
    skipped, line = run(
        tiny_config, "--layers", "3", "--batches", "1,2", "--contexts", "40", "--prefill", "", "--speculation", "off",
    )  # fmt: skip
    assert str(skipped).startswith("decode, batch 2, context 40: not measured, its caches take 1152921504.6 GB and")
    assert (line.batch, line.context) == (1, 40)


def test_drafts_pay_when_they_make_up_for_the_longer_step():
    def line(speculation, step_us):
        return layers.Line("decode", 8, 4096, speculation, True, step_us, 1.0, 1.0)

    (said,) = layers.break_even([line(False, 1000.0), line(True, 2500.0)])
    assert said == "batch 8, context 4096, graphs: drafts pay from 1.50 kept of a block on"
    assert layers.break_even([line(True, 2500.0)]) == []
