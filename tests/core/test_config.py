import dataclasses
import json
import warnings
from typing import get_type_hints

import pytest

from deepinfer.core.config import EngineConfig, EngineSettings, parse_bytes, setting_help
from deepinfer.core.environment import ConfigWarning
from deepinfer.core.errors import ConfigError


def load(environ=None, **settings):
    return EngineConfig.load(environ=environ or {}, **settings)


def test_every_broken_field_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(max_num_seqs=0, dtype="fp8", seed=-1, memory_utilization=float("nan"), strict=1, block_size=True)
    text = str(caught.value)
    for name in ("max_num_seqs", "dtype", "seed", "memory_utilization", "strict", "block_size"):
        assert name in text
    assert text.startswith("6 setting(s)")
    assert "'bfloat16', 'float32', got 'fp8'" in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 128, "window_page": 48}, "window_page must divide block_size, got 48 and 128"),
        ({"num_kv_blocks": 8, "kv_memory_bytes": 1 << 20}, "give one of them"),
        ({"ops": "moe"}, "'moe' is not of the form op=implementation"),
        ({"max_model_len": 0}, "max_model_len must be an integer of at least 1 or None, got 0"),
        ({"seed": 2**64}, "up to 18446744073709551615"),
        ({"memory_utilization": 0}, "a number above 0 up to 1, got 0"),
    ],
)
def test_contradictions_and_bounds_say_what_would_be_right(settings, message) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**settings)
    assert message in str(caught.value)


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(("block_size", "page"), [(128, 32), (16, 16), (48, 16), (2, 2), (1, 1)])
def test_window_page_follows_small_blocks_unless_given(block_size, page) -> None:
    assert EngineConfig(block_size=block_size).window_page == page
    assert EngineConfig(block_size=block_size, window_page=1).window_page == 1


@pytest.mark.parametrize(
    ("dtype", "given", "expected"),
    [("bfloat16", None, True), ("float32", None, False), ("bfloat16", False, False), ("float32", True, True)],
)
def test_activation_rounding_follows_dtype_unless_given(dtype, given, expected) -> None:
    assert EngineConfig(dtype=dtype, activation_rounding=given).rounds_activations is expected


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_argument_beats_file_beats_environment_beats_default(tmp_path, suffix) -> None:
    path = tmp_path / f"engine.{suffix}"
    values = {"max_num_seqs": 2, "seed": 2}
    toml = "".join(f"{name} = {value}\n" for name, value in values.items())
    path.write_text(toml if suffix == "toml" else json.dumps(values))
    environ = {"DEEPINFER_MAX_NUM_SEQS": "3", "DEEPINFER_SEED": "3", "DEEPINFER_BLOCK_SIZE": "3"}
    config = load(environ, config=path, max_num_seqs=256)
    # 256 is the default too: what is given counts, whatever its value
    assert (config.max_num_seqs, config.seed, config.block_size) == (256, 2, 3)
    assert config.max_num_batched_tokens == 2048


def test_unknown_names_are_refused_with_close_matches(tmp_path) -> None:
    with pytest.raises(ConfigError, match="'max_num_seq' is unknown; did you mean max_num_seqs"):
        load(max_num_seq=3)
    path = tmp_path / "engine.toml"
    path.write_text("sede = 3\nblok_size = 4\n")
    with pytest.raises(ConfigError) as caught:
        load(config=path)
    assert "'sede'" in str(caught.value) and "did you mean block_size" in str(caught.value)


@pytest.mark.parametrize("text", ["seed = ", "[1, 2]", ""])
def test_unreadable_file_is_named(tmp_path, text) -> None:
    path = tmp_path / "engine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"engine\.json"):
        load(config=path)
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load(config=tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("DEEPINFER_BATCH_INVARIANT", "0", "batch_invariant", False),
        ("DEEPINFER_BATCH_INVARIANT", "1", "batch_invariant", True),
        ("DEEPINFER_STRICT", "yes", "strict", True),
        ("DEEPINFER_MODEL", "folder", "model", "folder"),
        ("DEEPINFER_KV_MEMORY_BYTES", "8GiB", "kv_memory_bytes", 8 << 30),
        ("DEEPINFER_MEMORY_UTILIZATION", "0.5", "memory_utilization", 0.5),
        ("DEEPINFER_MAX_MODEL_LEN", "none", "max_model_len", None),
        ("DEEPINFER_ACTIVATION_ROUNDING", "false", "activation_rounding", False),
        ("DEEPINFER_ENGRAM_FORCE_GPU_STORAGE", "1", "engram", "memory"),
        ("DEEPINFER_OPS", "moe=cpu.moe", "ops", "moe=cpu.moe"),
        ("DEEPINFER_SEED", "", "seed", 0),
    ],
)
def test_variables_set_fields(variable, text, field, value) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(load({variable: text}), field) == value


def test_broken_variable_is_an_error() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs must be an integer of at least 1, got 'many'"):
        load({"DEEPINFER_MAX_NUM_SEQS": "many"})


def test_known_names_without_the_feature_warn() -> None:
    with pytest.warns(ConfigWarning, match="DEEPINFER_NCCL_NUM_SMS is not supported by this engine"):
        load({"DEEPINFER_NCCL_NUM_SMS": "32"})
    with pytest.warns(ConfigWarning, match="DEEPINFER_GC_INTERVAL_STEP is not supported"):
        load({"DEEPINFER_GC_INTERVAL_STEP": "4"})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("off", None, "compact")),
        ({"YOCO_PREFILL_TRUNCATION_MODE": "off", "YOCO_PREFILL_KEEP_TOKENS": "0"}, ("off", None, "compact")),
        ({"YOCO_PREFILL_TRUNCATION_MODE": "compact"}, ("decoder", None, "compact")),
        ({"YOCO_PREFILL_TRUNCATION_MODE": "Mask", "YOCO_PREFILL_KEEP_TOKENS": "140"}, ("decoder", 140, "mask")),
        ({"YOCO_PREFILL_TRUNCATION_MODE": "compact", "REPLAY": "full"}, ("full", None, "compact")),
        ({"YOCO_PREFILL_KEEP_TOKENS": "140", "REPLAY_KEEP_TOKENS": "200"}, ("off", 200, "compact")),
    ],
)
def test_replay_is_also_set_by_the_variables_of_deepseeks_engine(environ, expected) -> None:
    config = load({f"DEEPINFER_{name}": value for name, value in environ.items()})
    assert (config.replay, config.replay_keep_tokens, config.replay_form) == expected


def test_a_truncation_mode_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ConfigError, match="replay must be one of 'off', 'decoder', 'full', got 'compcat'"):
        load({"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "compcat"})
    with pytest.raises(ConfigError, match="replay_keep_tokens must be an integer"):
        load({"DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "many"})


def test_unknown_variables_warn_with_close_matches() -> None:
    with pytest.warns(ConfigWarning, match="did you mean DEEPINFER_BATCH_INVARIANT"):
        load({"DEEPINFER_BATCH_INVARIENT": "1"})
    with pytest.warns(ConfigWarning, match="is not a setting"):
        load({"DEEPINFER_max_num_seqs": "1"})


def test_variables_that_ask_for_nothing_or_belong_to_others_are_quiet() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load({"DEEPINFER_USE_NEXTN_DECODE": "0", "DEEPINFER_GOLDEN": "/x", "PATH": "/bin", "DEEPINFER": "1"})


def test_settings_mirror_the_fields() -> None:
    hints = get_type_hints(EngineConfig)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(EngineConfig)}
    assert fields.pop("model") is str
    assert get_type_hints(EngineSettings) == fields
    assert all(setting_help(name) for name in fields)


@pytest.mark.parametrize(
    ("text", "value"), [("4096", 4096), ("8GiB", 8 << 30), ("1.5k", 1500), (" 2 gi ", 2 << 30), ("3MB", 3_000_000)]
)
def test_parse_bytes(text, value) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "many", "1.5", "8XB", "0x10", "1e3"])
def test_parse_bytes_refuses(text) -> None:
    with pytest.raises(ValueError, match="number"):
        parse_bytes(text)


def test_names_of_the_draft_settings_are_honoured() -> None:
    asked = load({"DEEPINFER_USE_NEXTN_DECODE": "3", "DEEPINFER_ENABLE_MTP_VARLEN": "0"})
    assert (asked.speculation, asked.num_drafts, asked.draft_schedule) == ("coupled", 3, "fixed")
    assert load({"DEEPINFER_USE_NEXTN_DECODE": "0"}).speculation == "off"
