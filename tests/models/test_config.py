"""The configuration: real values are accepted, and every broken field is named with what would be right."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer.models.deepseek_v41_flash.config import ModelConfig
from deepinfer.models.deepseek_v41_flash.tensors import expected_tensors
from deepinfer.models.errors import ConfigError

REAL: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "real_config.json").read_text(encoding="utf-8"))


def broken(**text: Any) -> list[str]:
    """Problems of the real configuration with these text fields changed; `...` removes a field."""
    data = copy.deepcopy(REAL)
    for name, value in text.items():
        if value is ...:
            del data["text_config"][name]
        else:
            data["text_config"][name] = value
    return problems_of(data)


def problems_of(data: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(data)
    for problem in caught.value.problems:
        assert problem in str(caught.value)
    return list(caught.value.problems)


def test_the_released_configuration_is_accepted() -> None:
    config = ModelConfig.from_dict(REAL)
    assert config.text.num_layers == 40
    assert config.text.has_draft
    assert config.text.first_decoder_layer == 20
    assert config.text.ratios == (1, 2)
    assert config.text.group_width == 4096
    assert config.text.mix_size == 24
    assert config.text.engram_columns == 24
    assert config.eos_token_id == 1
    assert config.unknown_fields == ()


def test_the_released_configuration_expands_to_the_published_number_of_tensors() -> None:
    specs = expected_tensors(ModelConfig.from_dict(REAL))
    assert len(specs) == 96_085
    assert specs["layers.39.ffn.experts.383.w2.scale"].shape == (5120, 72)
    assert specs["layers.0.attn.wo_a.scale"].shape == (256, 128)
    assert specs["mtp.0.main_proj.weight"].shape == (5120, 15360)
    assert specs["mtp.2.confidence_head.proj.weight"].shape == (1, 5376)
    assert "layers.20.attn.compressor.wgate.weight" not in specs
    assert "layers.24.attn.indexer.wk.weight" not in specs
    assert {spec.part for spec in specs.values()} == {"backbone", "engram", "draft", "vision"}


def test_a_checkpoint_without_quantisation_has_the_same_names_without_scales() -> None:
    plain = {name: value for name, value in REAL.items() if name != "quantization_config"}
    quantised = set(expected_tensors(ModelConfig.from_dict(REAL)))
    names = set(expected_tensors(ModelConfig.from_dict(plain)))
    assert names == {name for name in quantised if not name.endswith(".scale")}


def test_layers_know_their_sources() -> None:
    text = ModelConfig.from_dict(REAL).text
    assert [text.kv_source_of(layer) for layer in (2, 7, 8, 13, 14, 19, 20, 39)] == [2, 2, 8, 8, 14, 14, 20, 20]
    assert [text.index_source_of(layer) for layer in (7, 19, 20, 23, 24, 39)] == [2, 14, 20, 20, 24, 36]
    assert [layer for layer in range(40) if text.uses_candidates(layer)] == [24, 28, 32, 36]
    with pytest.raises(ValueError, match="layer 1 sees its window only"):
        text.kv_source_of(1)


def test_fields_that_are_seldom_published_have_defaults() -> None:
    text = ModelConfig.from_dict(REAL).text
    assert (text.hc_shifted, text.use_fp4_sparse_kv, text.dspark_target_attn_input) == (True, True, True)
    assert text.index_k_source_layer_ids is None


def test_all_broken_fields_are_listed_at_once() -> None:
    problems = broken(hidden_size=-1, head_dim="512", o_groups=7, vocab_size=..., rms_norm_eps=float("nan"))
    assert problems == [
        "text_config.vocab_size: is absent; it must be an integer of at least 1",
        "text_config.hidden_size: -1 is not allowed; it must be an integer of at least 1",
        'text_config.head_dim: "512" is not allowed; it must be an integer of at least 1',
        "text_config.rms_norm_eps: NaN is not allowed; it must be a finite number above 0",
        "text_config.o_groups: 7 does not divide num_attention_heads, 64; it must",
    ]


RATIOS = REAL["text_config"]["compress_ratios"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "compress_ratios",
            [0, 0, 2],
            "has 3 entries; it needs one for each of 40 layers and 3 draft layers, 43 in all",
        ),
        ("compress_ratios", [*RATIOS[:-1], 1], "draft layers have ratios [0, 0, 1]"),
        ("compress_ratios", [0, 0, -2, *RATIOS[3:]], "it must be a list of integers of at least 0"),
        (
            "compress_ratios",
            [*RATIOS[:10], 1, *RATIOS[11:]],
            "layer 10 has ratio 1 but reads the compressed KV of layer 8, whose ratio is 2",
        ),
        ("kv_source_layer_ids", [8, 2, 14, 20], "is not in ascending order without repeats; write [2, 8, 14, 20]"),
        ("kv_source_layer_ids", [2, 8, 8, 14, 20], "is not in ascending order without repeats"),
        ("kv_source_layer_ids", [2, 8, 14, 20, 40], "names layer 40; layers run from 0 to 39"),
        ("kv_source_layer_ids", [8, 14, 20], "leaves layer 2 without a source"),
        ("kv_source_layer_ids", [1, 2, 8, 14, 20], "names window-only layers [1]"),
        ("index_source_layer_ids", [2, 8, 20, 24], "lacks KV sources [14]"),
        ("index_source_layer_ids", [8, 14, 20], "leaves layer 2 without a source"),
        ("index_k_source_layer_ids", [2, 8], "differs from kv_source_layer_ids [2, 8, 14, 20]"),
        ("candidate_source_layer_id", 21, "21 is not an index source"),
        ("candidate_source_layer_id", 14, "layers [20] start new sources after it; it must be 20 or later"),
        ("candidate_topk_blocks", 64, "hold 512 positions; a choice of 512 (index_topk) needs more than that"),
        ("head_dim", 520, "520 is not a multiple of 32"),
        ("index_head_dim", 100, "100 is not a multiple of 32"),
        ("qk_rope_head_dim", 63, "63 is odd"),
        ("qk_rope_head_dim", 256, "more than head_dim (512) or index_head_dim (128) has"),
        ("q_lora_rank", 1290, "1290 is not a multiple of 32, which quantised weights are cut by"),
        ("o_lora_rank", 1021, "8 groups (o_groups) of rank 1021 make 8168 columns, not a multiple of 32"),
        ("num_experts_per_tok", 385, "385 is more than n_routed_experts, 384"),
        ("engram_layer_ids", [1, 99], "names layer 99"),
        ("engram_num_embeddings", [384006168], "has 1 entries; engram_layer_ids has 2, one for each"),
        ("engram_num_embeddings", [384006168, 384006168], "it must be [384006168, 384016682]"),
        ("engram_max_ngram_size", 1, "it must be at least 2"),
        ("engram_pad_token_id", 129280, "is outside the vocabulary; ids run to 129279"),
        ("engram_compressed_vocab_size", 129281, "is more than vocab_size, 129280"),
        ("dspark_target_layer_ids", [37, 38, 40], "names layer 40"),
        ("dspark_target_layer_ids", [], "is empty; the draft needs the features of at least one layer"),
        ("dspark_noise_token_id", 129280, "is outside the vocabulary"),
        ("dspark_block_size", 0, "with 3 draft layers it must be at least 1"),
        ("dspark_num_experts_per_tok", 129, "is not between 1 and dspark_n_routed_experts, 128"),
        ("swiglu_limit", float("inf"), "it must be a finite number above 0"),
        ("hc_eps", 10**400, "it must be a finite number above 0"),
        ("num_key_value_heads", 8, "it must be 1"),
        ("hc_shifted", False, "it must be true"),
        ("scoring_func", "softmax", 'it must be "sqrtsoftplus"'),
        ("norm_topk_prob", 1, "it must be true"),
        ("num_attention_heads", True, "it must be an integer of at least 1"),
        ("n_routed_experts", 10**9, "it must be an integer from 1 to 65536"),
    ],
)
def test_a_broken_field_is_named_with_what_would_be_right(field: str, value: Any, message: str) -> None:
    problems = [problem for problem in broken(**{field: value}) if problem.startswith(f"text_config.{field}: ")]
    assert len(problems) == 1
    assert message in problems[0]


def test_one_fault_gives_one_line() -> None:
    assert len(broken(compress_ratios=[0, 0, 2])) == 1
    assert len(broken(kv_source_layer_ids=[8, 2, 14, 20])) == 1


def test_fields_outside_the_text_section_are_checked_too() -> None:
    data = copy.deepcopy(REAL)
    data.update(architectures=["DeepseekV4ForCausalLM"], bos_token_id=129280, eos_token_id=[1, -1], image_token_id=None)
    data["vision_config"].update(num_attention_heads=12, max_wh_ratio=-1)
    data["quantization_config"]["weight_block_size"] = [128, 128]
    data["text_config"]["rope_scaling"] = {"rope_type": "linear", "factor": 16}
    names = [problem.split(": ")[0] for problem in problems_of(data)]
    assert names == [
        "architectures",
        "eos_token_id",
        "quantization_config.weight_block_size",
        "text_config.rope_scaling.rope_type",
        "text_config.rope_scaling.beta_fast",
        "text_config.rope_scaling.beta_slow",
        "text_config.rope_scaling.original_max_position_embeddings",
        "vision_config.max_wh_ratio",
        "vision_config.num_attention_heads",
        "bos_token_id",
        "image_token_id",
    ]


def test_sections_of_the_wrong_kind_are_named() -> None:
    assert "text_config: is absent; it must be a JSON object" in problems_of({**REAL, "text_config": None})
    assert "text_config: [] is not a JSON object" in problems_of({**REAL, "text_config": []})
    assert problems_of([]) == ["the file holds []; it must hold a JSON object"]


def test_a_model_without_draft_engram_and_images_needs_none_of_their_fields() -> None:
    data = {name: value for name, value in REAL.items() if name not in ("vision_config", "image_token_id")}
    text = {k: v for k, v in REAL["text_config"].items() if not k.startswith(("engram_", "dspark_", "candidate_"))}
    text.update(num_nextn_predict_layers=0, compress_ratios=RATIOS[:40])
    config = ModelConfig.from_dict({**data, "text_config": text})
    assert not config.text.has_draft
    assert config.vision is None
    assert not any(config.text.uses_candidates(layer) for layer in range(40))
    assert {spec.part for spec in expected_tensors(config).values()} == {"backbone"}


def test_fields_nobody_reads_are_reported() -> None:
    data = copy.deepcopy(REAL)
    data["text_config"]["qk_norm"] = True
    data["transformers_version"] = "5.0"
    data["surprise"] = 1
    assert ModelConfig.from_dict(data).unknown_fields == ("surprise", "text_config.qk_norm")


def test_a_folder_without_a_readable_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json.*\n.*no such file"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": ')
    with pytest.raises(ConfigError, match=r"config\.json.*\n.*cannot be read as JSON"):
        ModelConfig.from_dir(tmp_path)
