"""A tokenizer of another model, and a `config.json` that is none, are refused before anything is read."""

import json
import shutil
from pathlib import Path

import pytest

from deepinfer.entrypoints.llm import LLM
from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny
from deepinfer.models.errors import ConfigError
from deepinfer.models.registry import LoadOptions, load_model


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_tiny(folder, seed=1, quant=False)
    return folder


@pytest.fixture
def tiny(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "tiny"))


def edit(folder: Path, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bos_token_id": 5}, "bos_token_id: config.json says 5, and the tokenizer's is 0"),
        ({"eos_token_id": [7, 9]}, "eos_token_id: config.json says 7, 9, and the tokenizer's is 1"),
        ({"pad_token_id": 0}, "pad_token_id: config.json says 0, and the tokenizer's is 2"),
    ],
)
def test_a_tokenizer_with_other_control_ids_is_refused(tiny, changes, message) -> None:
    edit(tiny, **changes)
    with pytest.raises(ConfigError) as caught:
        LLM(tiny, dtype="float32")
    assert message in str(caught.value) and "use the tokenizer.json that belongs" in str(caught.value)


def test_a_tokenizer_with_ids_above_the_vocabulary_is_refused(tiny) -> None:
    file = tiny / "tokenizer.json"
    definition = json.loads(file.read_text(encoding="utf-8"))
    config = json.loads((tiny / "config.json").read_text())
    size = config["text_config"]["vocab_size"]
    definition["added_tokens"].append({**definition["added_tokens"][-1], "id": size, "content": "<｜more｜>"})
    file.write_text(json.dumps(definition), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"text_config.vocab_size: is {size}, and the tokenizer has ids up to {size}"):
        LLM(tiny, dtype="float32")


def test_one_of_several_ends_is_enough(tiny) -> None:
    edit(tiny, eos_token_id=[7, 1])
    LLM(tiny, dtype="float32", num_kv_blocks=4).close()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", r"the file holds \[\]; it must hold a JSON object"),
        ("null", "the file holds null; it must hold a JSON object"),
        ("[" * 100_000, "cannot be read as JSON"),
        ('{"a": ' * 100_000, "cannot be read as JSON"),
        ("{", "cannot be read as JSON"),
        ("{}", "architectures: is None; it must be a list with one of those that run here"),
        ('{"architectures": 5}', "architectures: is 5"),
        ('{"architectures": [[]]}', r"architectures: is \[\[\]\]"),
        ('{"architectures": ' + "[" * 900 + "]" * 900 + "}", "architectures: is "),
    ],
)
def test_a_config_that_is_none_is_named(tmp_path, content, message) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(tmp_path, None, LoadOptions(), None)
    assert str(tmp_path / "config.json") in str(caught.value) and len(str(caught.value)) < 1000
