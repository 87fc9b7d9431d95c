"""`make_tiny`: complete, repeatable, in the released formats, and lively enough to test with."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepinfer.core.tokenizer import Tokenizer
from deepinfer.models.checkpoint import INDEX_FILE, Checkpoint
from deepinfer.models.deepseek_v41_flash.config import ModelConfig
from deepinfer.models.deepseek_v41_flash.engram_tables import EngramConstants
from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny
from deepinfer.models.deepseek_v41_flash.tensors import expected_tensors
from deepinfer.models.deepseek_v41_flash.weights import load_weights
from deepinfer.ops.formats import QTensor
from deepinfer.ops.quant import dequantize


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module", params=[True, False], ids=["quant", "plain"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "checkpoint"
    make_tiny(path, seed=7, quant=request.param)
    return path


def test_it_holds_exactly_the_tensors_that_its_config_asks_for(folder: Path) -> None:
    config, checkpoint = ModelConfig.from_dir(folder), Checkpoint.open(folder)
    assert set(checkpoint.tensors) == set(expected_tensors(config))
    load_weights(checkpoint, config)


def test_it_has_every_kind_of_layer(folder: Path) -> None:
    text = ModelConfig.from_dir(folder).text
    layers = range(text.num_layers)
    kinds = {(text.ratio_of(i), text.is_kv_source(i), text.is_index_source(i), text.uses_candidates(i)) for i in layers}
    assert {
        (0, False, False, False),  # window only
        (2, True, True, False),  # full, ratio 2
        (2, False, False, False),  # reuse
        (1, True, True, False),  # full, ratio 1, makes the pool
        (1, False, True, True),  # reindex in the pool
        (1, False, False, False),  # reuse
    } - kinds <= ({(2, False, False, False)} if text.hidden_size == 64 else set())
    assert text.has_draft and text.engram_layer_ids and text.max_position_embeddings == 4096
    assert text.candidate_source_layer_id == text.first_decoder_layer


def test_it_is_about_four_megabytes(folder: Path) -> None:
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert 1_500_000 < size < 4_500_000


def test_weights_are_sharded_by_an_index(folder: Path) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert index["metadata"]["total_size"] == Checkpoint.open(folder).num_bytes
    sizes = [(folder / file).stat().st_size for file in files]
    assert max(sizes) < 1.2 * min(sizes)
    table = "layers.1.engram.embed"
    if f"{table}.scale" in index["weight_map"]:
        assert index["weight_map"][f"{table}.scale"] == index["weight_map"][f"{table}.weight"]


def test_storage_formats_are_the_released_ones(tmp_path: Path) -> None:
    make_tiny(tmp_path / "t")
    tensors = Checkpoint.open(tmp_path / "t").tensors
    assert tensors["layers.0.attn.wq_a.weight"].dtype == "F8_E4M3"
    assert tensors["layers.0.attn.wq_a.scale"].dtype == "F8_E8M0"
    assert tensors["layers.0.ffn.experts.0.w1.weight"].dtype == "I8"
    assert tensors["layers.1.engram.embed.scale"].shape == (434, 1)
    assert tensors["layers.0.hc_attn_fn"].dtype == tensors["vision.norm.weight"].dtype == "F32"
    assert tensors["embed.weight"].dtype == "BF16"


def test_the_same_seed_gives_the_same_bytes_in_another_process(folder: Path, tmp_path: Path) -> None:
    quant = ModelConfig.from_dir(folder).quantization is not None
    code = (
        "import sys; from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny; "
        f"make_tiny(sys.argv[1], seed=7, quant={quant})"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "again")], check=True, env=environment)
    assert digests(tmp_path / "again") == digests(folder)


def test_another_seed_gives_other_weights_and_the_same_tokenizer(folder: Path, tmp_path: Path) -> None:
    quant = ModelConfig.from_dir(folder).quantization is not None
    make_tiny(tmp_path / "other", seed=8, quant=quant)
    mine, other = digests(folder), digests(tmp_path / "other")
    assert mine["tokenizer.json"] == other["tokenizer.json"]
    assert mine["model-00001-of-00003.safetensors"] != other["model-00001-of-00003.safetensors"]


def test_one_shard_is_a_single_file_of_the_same_values(folder: Path, tmp_path: Path) -> None:
    quant = ModelConfig.from_dir(folder).quantization is not None
    make_tiny(tmp_path / "one", seed=7, quant=quant, shards=1)
    assert {path.name for path in (tmp_path / "one").iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    one, many = Checkpoint.open(tmp_path / "one"), Checkpoint.open(folder)
    for name in many.tensors:
        assert torch.equal(one.get(name).view(torch.uint8), many.get(name).view(torch.uint8)), name


def test_the_tokenizer_has_the_control_tokens_and_the_declared_number_of_keys(folder: Path) -> None:
    config, tokenizer = ModelConfig.from_dir(folder), Tokenizer.from_dir(folder)
    assert tokenizer.vocab_size == config.text.vocab_size
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert tokenizer.token_to_id("<｜deepseek_image｜>") == config.image_token_id
    assert tokenizer.token_to_id("<｜noise｜>") == config.text.dspark_noise_token_id
    tasks = ["action", "query", "authority", "domain", "title", "read_url"]
    tokens = [
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜System｜>",
        "<think>",
        "</think>",
        "｜DSML｜",
        "<｜latest_reminder｜>",
    ]
    for token in [*tokens, *(f"<｜{task}｜>" for task in tasks)]:
        token_id = tokenizer.token_to_id(token)
        assert token_id in tokenizer.special_ids
        assert tokenizer.encode(token, parse_special=True) == [token_id]
    EngramConstants.build(config.text, tokenizer)
    for text in ("The answer is 42.", "你好 Привет \U0001f600\n\tdef f(x):", "</think>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_values_are_finite_and_of_a_sane_size(folder: Path) -> None:
    weights = load_weights(Checkpoint.open(folder), ModelConfig.from_dir(folder))
    head, norm = weights.head.float(), weights.norm.float()
    logits = torch.nn.functional.rms_norm(weights.embed.float(), norm.shape, norm) @ head.T
    assert 1 < logits.std() < 2
    for layer in weights.layers:
        for weight in (*vars(layer.attn).values(), layer.ffn.w13, layer.ffn.w2, layer.hc_attn.fn):
            plain = dequantize(weight, torch.float32) if isinstance(weight, QTensor) else weight.float()
            assert plain.isfinite().all()
            assert 0.01 < plain.std() < 2


def test_a_folder_that_is_not_empty_is_refused_unless_forced(tmp_path: Path) -> None:
    keep = tmp_path / "t" / "mine.txt"
    keep.parent.mkdir()
    keep.write_text("keep me")
    with pytest.raises(FileExistsError, match="is there already; give a new or empty folder, or force"):
        make_tiny(keep.parent)
    assert [path.name for path in keep.parent.iterdir()] == ["mine.txt"]
    make_tiny(keep.parent, shards=2, force=True)
    make_tiny(keep.parent, shards=1, force=True)
    assert keep.read_text() == "keep me"
    names = {path.name for path in keep.parent.iterdir()}
    assert names == {"mine.txt", "config.json", "tokenizer.json", "model.safetensors"}


def test_progress_ends_at_the_number_of_tensors(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    config = make_tiny(tmp_path / "t", quant=False, progress=lambda done, total: seen.append((done, total)))
    total = len(expected_tensors(config))
    assert seen[-1] == (total, total)


def test_impossible_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shards must be at least 1 and seed at least 0, got 0 and -1"):
        make_tiny(tmp_path / "t", seed=-1, shards=0)
    assert not (tmp_path / "t").exists()
