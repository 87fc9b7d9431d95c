"""`DEEPINFER_*` variables: our own, one per setting, and those that users of DeepSeek's DeepInfer know.

Each of theirs is listed here, either with the settings that it means, or with the reason why it means nothing in this
engine: then it warns, unless its value asks for what happens anyway. `core.config` judges the values.

Source: the environment of DeepSeek's DeepInfer 0.1.0.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "DEEPINFER_"
TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")

_OUR_OTHERS = frozenset({"GOLDEN", "CACHE_DIR", "CONFORMANCE_BACKEND", "TWIN", "TWIN_ORDER", "LOWER"})
"""No settings of an engine; read where they are used."""
_FRAMES_UP = 4  # to whoever asked for a configuration


class ConfigWarning(UserWarning):
    """A setting that has no effect: a `DEEPINFER_*` variable that is unknown, or means nothing here."""


@dataclass(frozen=True)
class TheirVariable:
    """A variable of DeepSeek's engine that means something here.

    Attributes:
        name: without the prefix.
        fields: the settings it may set.
        meaning: how values translate, in words.
        translate: from the text to values by setting; text among them is read like the setting's own variable.
    """

    name: str
    fields: tuple[str, ...]
    meaning: str
    translate: Callable[[str], dict[str, Any]]


@dataclass(frozen=True)
class WithoutMeaning:
    """Variables of DeepSeek's engine that have no effect here.

    Attributes:
        names: without the prefix.
        reason: why, and what to do instead.
        agrees: values that ask for what happens anyway.
    """

    names: tuple[str, ...]
    reason: str
    agrees: tuple[str, ...] = ()


def _switch(text: str, setting: str, *, on: dict[str, Any], off: dict[str, Any]) -> dict[str, Any]:
    """What a switch means; a value that is neither on nor off is left to be refused as one of the setting's."""
    low = text.lower()
    return on if low in TRUE else off if low in FALSE else {setting: text}


def _replay(text: str) -> dict[str, Any]:
    modes = {"compact": {"replay": "decoder"}, "mask": {"replay": "decoder", "replay_form": "mask"}}
    return modes.get(text.lower(), {"replay": text.lower()})


def _every(text: str) -> dict[str, Any]:
    """Row counts at an interval; what is no interval is left to be refused as a row count."""
    if not text.isdecimal() or int(text) == 0:
        return {"graph_batch_sizes": text}
    return {"graph_batch_sizes": tuple(range(int(text), 513, int(text)))}


TRANSLATED = (
    TheirVariable("HF_MODEL_DIR", ("model",), "the same", lambda text: {"model": text}),
    TheirVariable(
        "USE_NEXTN_DECODE",
        ("speculation", "num_drafts"),
        "n is `speculation=coupled` with `num_drafts=n`, 0 is `speculation=off`",
        lambda text: {"speculation": "off"} if text == "0" else {"speculation": "coupled", "num_drafts": text},
    ),
    TheirVariable(
        "ENABLE_MTP_VARLEN",
        ("draft_schedule",),
        "1 is `adaptive`, 0 is `fixed`",
        lambda text: _switch(
            text, "draft_schedule", on={"draft_schedule": "adaptive"}, off={"draft_schedule": "fixed"}
        ),
    ),
    TheirVariable(
        "DFLASH_CONFIDENCE_HEAD_TEMPERATURE",
        ("confidence_temperature",),
        "the same: one number, or one for each draft with commas between",
        lambda text: {"confidence_temperature": text},
    ),
    TheirVariable(
        "DISABLE_SYNC_GUARD",
        ("sync_guard",),
        "1 is `false`, 0 is `true`",
        lambda text: _switch(text, "sync_guard", on={"sync_guard": False}, off={"sync_guard": True}),
    ),
    TheirVariable(
        "ZERO_OVERHEAD_SCHEDULING",
        ("async_scheduling",),
        "the same",
        lambda text: {"async_scheduling": text},
    ),
    TheirVariable(
        "ENFORCE_EAGER",
        ("graphs",),
        "1 is `graphs=false`; 0 is `true`",
        lambda text: _switch(text, "graphs", on={"graphs": False}, off={"graphs": True}),
    ),
    TheirVariable(
        "CUDAGRAPH_BATCH_SIZE_INTERVAL",
        ("graph_batch_sizes",),
        "n is every n-th row count up to 512",
        _every,
    ),
    TheirVariable(
        "YOCO_PREFILL_TRUNCATION_MODE",
        ("replay", "replay_form"),
        "`compact` is `replay=decoder`; `mask` is that with `replay_form=mask`; `off` is `off`",
        _replay,
    ),
    TheirVariable(
        "YOCO_PREFILL_KEEP_TOKENS",
        ("replay_keep_tokens",),
        "the same; 0 is the default",
        lambda text: {"replay_keep_tokens": None if text == "0" else text},
    ),
    TheirVariable(
        "ENGRAM_FORCE_GPU_STORAGE",
        ("engram",),
        "1 is `memory`; 0 leaves it as it is",
        lambda text: _switch(text, "engram", on={"engram": "memory"}, off={}),
    ),
    TheirVariable("XGRAMMAR_TIMEOUT", ("grammar_timeout",), "the same", lambda text: {"grammar_timeout": text}),
    TheirVariable("SO_BUILDER_CPUS", ("grammar_workers",), "the same", lambda text: {"grammar_workers": text}),
    TheirVariable(
        "XGRAMMAR_CACHE_LIMIT_BYTES", ("grammar_cache_bytes",), "the same", lambda text: {"grammar_cache_bytes": text}
    ),
    TheirVariable(
        "XGRAMMAR_DISABLE_CACHE",
        ("grammar_cache_bytes",),
        "1 is 0 bytes; 0 leaves it as it is",
        lambda text: _switch(text, "grammar_cache_bytes", on={"grammar_cache_bytes": 0}, off={}),
    ),
)
"""A later one goes before an earlier one, and our own variables before all of them."""

_ONE_DEVICE = "an engine of this version runs on one device"
WITHOUT_MEANING = (
    WithoutMeaning(
        ("ACCELERATOR",),
        "`backend=auto` takes the best backend that this machine can run; set DEEPINFER_BACKEND to choose another",
    ),
    WithoutMeaning(
        ("DFLASH_ENFORCE_EAGER", "DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL"),
        "drafting is captured with the step that it stands behind: see DEEPINFER_GRAPHS, DEEPINFER_GRAPH_BATCH_SIZES",
    ),
    WithoutMeaning(
        ("JIT_CACHE_DIR",), "compilers have their own settings for it; DEEPINFER_CACHE_DIR is where verdicts go"
    ),
    WithoutMeaning(("NCCL_NUM_SMS", "USERBUFFER_COMM_SMS", "GLOO_TIMEOUT"), _ONE_DEVICE),
    WithoutMeaning(("NCCL_MEMORY_SAMPLE_INTERVAL_STEPS",), _ONE_DEVICE),
    WithoutMeaning(
        ("REARRANGE_P2P_GROUPS", "OVERRIDE_NUM_EXTRA_EXPERTS", "EXPERT_REARRANGEMENT_STEP_INTERVAL"),
        f"experts are neither replicated nor moved: {_ONE_DEVICE}",
        ("0",),
    ),
    WithoutMeaning(
        ("EXPERT_COUNT_WINDOW_SIZE", "REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE", "MOE_LB_STAT_INTERVAL"),
        f"experts are neither replicated nor moved: {_ONE_DEVICE}",
    ),
    WithoutMeaning(("SHOW_EPLB_DETAIL",), f"experts are neither replicated nor moved: {_ONE_DEVICE}", ("0",)),
    WithoutMeaning(
        ("FORCE_IMBALANCE_RATIO", "FORCE_LOAD_BALANCE"), "experts are always the router's own", ("0", "0.0")
    ),
    WithoutMeaning(
        ("PREFILL_MAX_SUM_SEQLEN_K",), "the work of a step is bounded by its rows; set DEEPINFER_MAX_NUM_BATCHED_TOKENS"
    ),
    WithoutMeaning(
        ("PREFILL_ATTEMPT_INTERVAL", "PREFILL_ANY_ATTEMPT_INTERVAL"),
        "each step mixes prefill and decode, so no step has to be voted a prefill",
    ),
    WithoutMeaning(("INDEX_ATTN_MEMORY_LIMIT",), "ops state what scratch they need when the model is built"),
    WithoutMeaning(("MAX_BACKTRACKING_TOKENS",), "how far a sequence may be rolled back follows from `num_drafts`"),
    WithoutMeaning(("NUM_STATE_SLOTS_RATIO",), "there is a state slot for each of `max_num_seqs`"),
    WithoutMeaning(
        ("PREFILL_STORE_EXTRA_STATE", "PREFILL_STORE_EXTRA_SIZE"),
        "window pages are kept by `prefix_window_pages`, at any block boundary",
        ("0",),
    ),
    WithoutMeaning(("ENGRAM_PAD_TOKEN",), "it is read from the checkpoint's own configuration"),
    WithoutMeaning(("SAMPLER_FORCE_TOPK",), "top-k is a request's own `top_k`", ("0",)),
    WithoutMeaning(("DECODE_TOKEN_BLACKLIST",), "what is forbidden is a request's own `logit_bias` or `bad_words`"),
    WithoutMeaning(
        ("COMPUTE_SUM_SMALLER_PROBS",), "results have a token's rank and logprob, no cumulative probability", ("0",)
    ),
    WithoutMeaning(
        ("DECODE_PERF_CACHE_DIR", "DECODE_PERF_CACHE_TTL_SEC"),
        "the cost of a step is measured while the engine runs, not kept",
    ),
    WithoutMeaning(("XGRAMMAR_DEBUG",), "grammars have no debug output", ("0",)),
    WithoutMeaning(
        ("LOGGING_INTERVAL_STEP", "RINGBUFFER_WARNING_INTERVAL", "CPP_LOG_LEVEL"),
        "there is no log by steps; the counters are `LLM.stats`",
    ),
    WithoutMeaning(("GC_INTERVAL_STEP",), "Python's garbage collector is left as it is"),
    WithoutMeaning(
        ("PROFILE_TORCH_CUDA_MEMORY", "ENABLE_MEMORY_TRACING", "PROFILE_HTTP_ENABLE"),
        "there is no profiler inside; use the one of torch",
        ("0",),
    ),
    WithoutMeaning(("PROFILE_HTTP_PORT_BASE", "TORCH_PROFILER_DIR"), "there is no profiler inside; use torch's"),
    WithoutMeaning(
        ("USE_MULTIMODAL_POOL", "MULTIMODAL_POOL_SIZE_GB", "MULTI_MODAL_BUFFER_SIZE", "MULTI_MODAL_WORKER_TIMEOUT"),
        "prompts with images are refused in this version",
    ),
)


def read_variables(environ: Mapping[str, str], fields: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Settings that an environment gives; what has no effect warns.

    Args:
        environ: all variables of a process; empty ones count as absent.
        fields: names of the settings, and how each one's text is read.
    """
    given = {
        name.removeprefix(PREFIX): text.strip()
        for name, text in environ.items()
        if name.startswith(PREFIX) and text.strip()
    }
    found: dict[str, Any] = {}
    for variable in TRANSLATED:
        if variable.name in given:
            values = variable.translate(given.pop(variable.name))
            found |= {name: fields[name](v) if isinstance(v, str) else v for name, v in values.items()}
    for name in [name for name in given if name.isupper() and name.lower() in fields]:
        found[name.lower()] = fields[name.lower()](given.pop(name))
    for message in _without_effect(given, fields):
        warnings.warn(message, ConfigWarning, _FRAMES_UP)
    return found


def _without_effect(given: Mapping[str, str], fields: Mapping[str, object]) -> Iterator[str]:
    reasons = {name: group for group in WITHOUT_MEANING for name in group.names}
    known = [*map(str.upper, fields), *sorted(reasons), *(variable.name for variable in TRANSLATED)]
    for name in sorted(given):
        if name in reasons:
            if given[name].lower() not in reasons[name].agrees:
                yield f"{PREFIX}{name} is not supported by this engine and has no effect: {reasons[name].reason}"
        elif name not in _OUR_OTHERS:
            yield f"{PREFIX}{name} is not a setting and has no effect{close_matches(name, known, PREFIX)}"


def close_matches(name: str, known: list[str], prefix: str = "") -> str:
    """What may have been meant, as the end of a sentence; empty if nothing is close."""
    matches = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(prefix + match for match in matches)}?" if matches else ""
