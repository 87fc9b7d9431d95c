"""Variables: ours, those of DeepSeek's engine, and the page about all of them."""

import importlib.util
import warnings
from dataclasses import fields

import pytest

from deepinfer.core.config import EngineConfig, parse_settings
from deepinfer.core.environment import PREFIX, TRANSLATED, WITHOUT_MEANING, ConfigWarning
from deepinfer.core.errors import ConfigError

# Source: DeepInfer 0.1.0. Those of ours that have its names (BATCH_INVARIANT) are in no table.
THEIRS = """
    ACCELERATOR COMPUTE_SUM_SMALLER_PROBS JIT_CACHE_DIR NCCL_NUM_SMS USERBUFFER_COMM_SMS GLOO_TIMEOUT
    REARRANGE_P2P_GROUPS OVERRIDE_NUM_EXTRA_EXPERTS EXPERT_COUNT_WINDOW_SIZE EXPERT_REARRANGEMENT_STEP_INTERVAL
    REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE MOE_LB_STAT_INTERVAL FORCE_IMBALANCE_RATIO FORCE_LOAD_BALANCE
    SHOW_EPLB_DETAIL PREFILL_MAX_SUM_SEQLEN_K INDEX_ATTN_MEMORY_LIMIT USE_NEXTN_DECODE ENABLE_MTP_VARLEN
    MAX_BACKTRACKING_TOKENS DFLASH_CONFIDENCE_HEAD_TEMPERATURE ENGRAM_PAD_TOKEN ENGRAM_FORCE_GPU_STORAGE
    SAMPLER_FORCE_TOPK DECODE_TOKEN_BLACKLIST ENFORCE_EAGER DFLASH_ENFORCE_EAGER CUDAGRAPH_BATCH_SIZE_INTERVAL
    DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL DECODE_PERF_CACHE_DIR DECODE_PERF_CACHE_TTL_SEC NUM_STATE_SLOTS_RATIO
    PREFILL_STORE_EXTRA_STATE PREFILL_STORE_EXTRA_SIZE XGRAMMAR_DEBUG XGRAMMAR_TIMEOUT XGRAMMAR_DISABLE_CACHE
    XGRAMMAR_CACHE_LIMIT_BYTES SO_BUILDER_CPUS PREFILL_ATTEMPT_INTERVAL PREFILL_ANY_ATTEMPT_INTERVAL
    ZERO_OVERHEAD_SCHEDULING LOGGING_INTERVAL_STEP NCCL_MEMORY_SAMPLE_INTERVAL_STEPS RINGBUFFER_WARNING_INTERVAL
    GC_INTERVAL_STEP YOCO_PREFILL_TRUNCATION_MODE YOCO_PREFILL_KEEP_TOKENS DISABLE_SYNC_GUARD BATCH_INVARIANT
    PROFILE_TORCH_CUDA_MEMORY ENABLE_MEMORY_TRACING PROFILE_HTTP_ENABLE PROFILE_HTTP_PORT_BASE TORCH_PROFILER_DIR
    USE_MULTIMODAL_POOL MULTIMODAL_POOL_SIZE_GB MULTI_MODAL_BUFFER_SIZE MULTI_MODAL_WORKER_TIMEOUT CPP_LOG_LEVEL
    HF_MODEL_DIR
"""


def load(**variables):
    return EngineConfig.load(environ={PREFIX + name: text for name, text in variables.items()})


def test_each_of_their_variables_stands_in_one_place() -> None:
    settings = {field.name.upper() for field in fields(EngineConfig)}
    listed = [variable.name for variable in TRANSLATED] + [name for group in WITHOUT_MEANING for name in group.names]
    assert sorted([*listed, "BATCH_INVARIANT"]) == sorted(THEIRS.split())
    assert settings.isdisjoint(listed) and "BATCH_INVARIANT" in settings
    for variable in TRANSLATED:
        assert {name.upper() for name in variable.fields} <= settings


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_MODEL_DIR": "/Models/V4.1"}, {"model": "/Models/V4.1"}),
        ({"HF_MODEL_DIR": "/a", "MODEL": "/b"}, {"model": "/b"}),
        ({"USE_NEXTN_DECODE": "5"}, {"speculation": "coupled", "num_drafts": 5}),
        ({"USE_NEXTN_DECODE": " 0 "}, {"speculation": "off", "num_drafts": None}),
        ({"USE_NEXTN_DECODE": "5", "SPECULATION": "rejection"}, {"speculation": "rejection", "num_drafts": 5}),
        ({"ENABLE_MTP_VARLEN": "False"}, {"draft_schedule": "fixed"}),
        ({"ENABLE_MTP_VARLEN": "1"}, {"draft_schedule": "adaptive"}),
        ({"DFLASH_CONFIDENCE_HEAD_TEMPERATURE": "1.5"}, {"confidence_temperature": (1.5,)}),
        ({"DFLASH_CONFIDENCE_HEAD_TEMPERATURE": "1,0.5, 2"}, {"confidence_temperature": (1.0, 0.5, 2.0)}),
        ({"ZERO_OVERHEAD_SCHEDULING": "1"}, {"async_scheduling": True}),
        ({"ZERO_OVERHEAD_SCHEDULING": "0"}, {"async_scheduling": False}),
        ({"DISABLE_SYNC_GUARD": "1"}, {"sync_guard": False}),
        ({"DISABLE_SYNC_GUARD": "0"}, {"sync_guard": True}),
        ({"ENGRAM_FORCE_GPU_STORAGE": "0", "ENGRAM": "mmap"}, {"engram": "mmap"}),
        ({"ENGRAM_FORCE_GPU_STORAGE": "1"}, {"engram": "memory"}),
        ({"XGRAMMAR_TIMEOUT": "7.5", "SO_BUILDER_CPUS": "4"}, {"grammar_timeout": 7.5, "grammar_workers": 4}),
        ({"XGRAMMAR_CACHE_LIMIT_BYTES": "10GiB"}, {"grammar_cache_bytes": 10 << 30}),
        ({"XGRAMMAR_CACHE_LIMIT_BYTES": "10GiB", "XGRAMMAR_DISABLE_CACHE": "1"}, {"grammar_cache_bytes": 0}),
        ({"XGRAMMAR_DISABLE_CACHE": "0"}, {"grammar_cache_bytes": 1 << 30}),
        ({"BATCH_INVARIANT": "0"}, {"batch_invariant": False}),
    ],
)
def test_variables_of_deepseeks_engine_mean_settings(variables, expected) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load(**variables)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"USE_NEXTN_DECODE": "many"}, "num_drafts must be an integer of at least 1 or None, got 'many'"),
        ({"USE_NEXTN_DECODE": "-1"}, "num_drafts must be an integer of at least 1 or None, got -1"),
        ({"XGRAMMAR_TIMEOUT": "soon"}, "grammar_timeout must be a number above 0"),
        ({"DFLASH_CONFIDENCE_HEAD_TEMPERATURE": "1,,2"}, "confidence_temperature must be one or several"),
        ({"DFLASH_CONFIDENCE_HEAD_TEMPERATURE": "0"}, "confidence_temperature must be one or several"),
        ({"YOCO_PREFILL_KEEP_TOKENS": "-3"}, "replay_keep_tokens must be an integer of at least 1"),
        ({"ZERO_OVERHEAD_SCHEDULING": "maybe"}, "async_scheduling must be true or false, got 'maybe'"),
        ({"DISABLE_SYNC_GUARD": "ture"}, "sync_guard must be true or false, got 'ture'"),
        ({"ENABLE_MTP_VARLEN": "2"}, "draft_schedule must be one of 'adaptive', 'fixed', got '2'"),
        ({"ENGRAM_FORCE_GPU_STORAGE": "gpu"}, "engram must be one of 'memory', 'mmap', got 'gpu'"),
        ({"XGRAMMAR_DISABLE_CACHE": "never"}, "grammar_cache_bytes must be an integer"),
    ],
)
def test_their_values_are_judged_like_ours(variables, message) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**variables)
    assert message in str(caught.value)


@pytest.mark.parametrize("group", WITHOUT_MEANING, ids=lambda group: group.names[0])
def test_what_means_nothing_says_why_unless_it_asks_for_nothing(group) -> None:
    for name in group.names:
        with pytest.warns(ConfigWarning) as caught:
            assert load(**{name: "17"}) == load()
        (warning,) = caught
        assert f"{PREFIX}{name} is not supported" in str(warning.message) and group.reason in str(warning.message)
        assert warning.filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for text in ("", " ", *group.agrees):
                load(**{name: text})


def test_settings_by_name_are_read_like_variables() -> None:
    given = parse_settings(["speculation=coupled", "num_drafts=none", "kv_memory_bytes=8GiB", "ops=a=b,c=d"])
    assert given == {"speculation": "coupled", "num_drafts": None, "kv_memory_bytes": 8 << 30, "ops": "a=b,c=d"}
    assert parse_settings([]) == {}
    with pytest.raises(ConfigError, match="'seed' is not of the form name=value"):
        parse_settings(["seed"])
    with pytest.raises(ConfigError, match="'sede' is unknown; did you mean seed"):
        parse_settings(["sede=3"])


def test_the_page_is_current(pytestconfig) -> None:
    path = pytestconfig.rootpath / "tools" / "configuration_table.py"
    spec = importlib.util.spec_from_file_location("configuration_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text(encoding="utf-8") == module.page(), f"run python {path}"
