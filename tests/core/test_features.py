"""The list of features: it is complete, its examples ask for what they say, and the page about it is current."""

import dataclasses
import importlib.util

import pytest

from deepinfer import SamplingParams
from deepinfer.core.features import CONFLICTS, FEATURES, asked, refusal
from deepinfer.core.shapers import BadWords, FixedShape, ShapingContext, make_shaper
from deepinfer.core.tokenizer import Tokenizer

ALWAYS = {"max_tokens", "include_stop_str_in_output", "skip_special_tokens"}
"""Parameters that qualify others and ask for nothing of their own."""


def test_the_page_is_current(pytestconfig) -> None:
    path = pytestconfig.rootpath / "tools" / "feature_tables.py"
    spec = importlib.util.spec_from_file_location("feature_tables", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text(encoding="utf-8") == module.page(), f"run python {path}"


def test_every_parameter_belongs_to_a_feature() -> None:
    named = {name for feature in FEATURES for name in feature.example} | ALWAYS
    named |= {"presence_penalty", "repetition_penalty", "top_k", "min_p", "so_args"}
    assert named == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_an_example_asks_for_its_feature(feature) -> None:
    assert feature in asked(SamplingParams(**feature.example))
    quiet = asked(SamplingParams(temperature=0.0))
    assert feature not in quiet


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_what_shapes_rows_has_a_shaper(feature, pytestconfig, monkeypatch) -> None:
    monkeypatch.setattr("deepinfer.core.shapers.find_processor", lambda name: lambda *_: lambda ids, logits: logits)
    context = ShapingContext(384, (1,), Tokenizer.from_dir(pytestconfig.rootpath / "tests" / "data"))
    params = SamplingParams(**feature.example)
    others = [] if params.structured_output is None else [BadWords([])]  # the engine makes a grammar's shaper
    shaper = make_shaper(params, [5], context, *others)
    assert (shaper is not None) == feature.shapes_rows
    assert feature.waits == (shaper is not None and not isinstance(shaper, FixedShape))


def test_conflicts_name_features_and_are_refused() -> None:
    names = {feature.name: feature for feature in FEATURES}
    for conflict in CONFLICTS:
        examples = {**names[conflict.first].example, **names[conflict.second].example}
        assert conflict.reason in (refusal(SamplingParams(**examples)) or "")
    assert refusal(SamplingParams()) is None
    assert "no tokenizer" in (refusal(SamplingParams(stop="a"), has_tokenizer=False) or "")
