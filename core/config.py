"""The engine's settings: one frozen object, validated as a whole, and the sources it is built from.

Sources in order of rank: arguments, a TOML or JSON file, `DEEPINFER_*` variables, defaults. Every field of
`EngineConfig` is also a variable (`DEEPINFER_MAX_NUM_SEQS`); `core.environment` reads them. What only the checkpoint or
the device can decide (how many blocks fit, whether a length exceeds the model's) is checked where those are known. No
torch here, so that a command line can print its help at once.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypedDict

from deepinfer.core.environment import FALSE, TRUE, close_matches, read_variables
from deepinfer.core.errors import ConfigError
from deepinfer.ops.show import shown

DEFAULT_WINDOW_PAGE = 32
MAX_SEED = 2**64 - 1

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class EngineSettings(TypedDict, total=False):
    """`EngineConfig`'s fields as keywords, each optional: what `LLM` takes."""

    backend: str
    dtype: Literal["bfloat16", "float32"]
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    num_kv_blocks: int | None
    kv_memory_bytes: int | None
    memory_utilization: float
    block_size: int
    window_page: int
    prefix_caching: bool
    prefix_window_pages: int | None
    kv_rounding: bool
    activation_rounding: bool | None
    batch_invariant: bool
    strict: bool
    verify_kernels: bool
    seed: int
    engram: Literal["memory", "mmap"]
    load_draft: bool
    load_vision: bool
    num_threads: int | None
    ops: str
    async_scheduling: bool | None
    speculation: Literal["off", "coupled", "rejection"]
    num_drafts: int | None
    draft_schedule: Literal["adaptive", "fixed"]
    confidence_temperature: tuple[float, ...]
    sync_guard: bool
    graphs: bool
    graph_batch_sizes: tuple[int, ...]
    max_graph_rows: int
    replay: Literal["off", "decoder", "full"]
    replay_keep_tokens: int | None
    replay_form: Literal["compact", "mask"]
    grammar_timeout: float
    grammar_queue_timeout: float
    grammar_workers: int
    grammar_cache_bytes: int


@dataclass(frozen=True)
class _Rule:
    """What a field accepts. Bounds are inclusive; a float's lower bound is not."""

    kind: type
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False

    def problem(self, value: Any) -> str | None:
        if value is None:
            return None if self.optional else f"must be {self._wanted()}, got None"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = is_number if self.kind is float else type(value) is self.kind
        if fits and self.choices:
            fits = value in self.choices
        if fits and self.low is not None:
            fits = value > self.low if self.kind is float else value >= self.low
        if fits and self.high is not None:
            fits = value <= self.high
        return None if fits else f"must be {self._wanted()}, got {shown(value)}"

    def parse(self, text: str) -> Any:
        """The value that an environment variable spells; text that spells none is returned as it is."""
        low = text.strip().lower()
        if self.optional and low in ("none", "auto"):
            return None
        if self.kind is bool and low in TRUE + FALSE:
            return low in TRUE
        try:
            return parse_bytes(text) if self.kind is int else float(text) if self.kind is float else text
        except ValueError:
            return text

    def _wanted(self) -> str:
        if self.choices:
            return "one of " + ", ".join(map(repr, self.choices))
        if self.kind in (bool, str):
            return "true or false" if self.kind is bool else "a string"
        what = "an integer" if self.kind is int else "a number"
        low = "" if self.low is None else f" {'above' if self.kind is float else 'of at least'} {self.low}"
        high = "" if self.high is None else f" up to {self.high}"
        return what + low + high + (" or None" if self.optional else "")


class _NumbersRule(_Rule):
    """A field of one or several numbers above `low`, kept as a tuple."""

    def problem(self, value: Any) -> str | None:
        one = _Rule(float, low=self.low, high=self.high)
        items = value if isinstance(value, tuple) else (value,)
        fits = bool(items) and all(one.problem(item) is None and math.isfinite(item) for item in items)
        return None if fits else f"must be one or several {self._wanted()}, got {shown(value)}"

    def parse(self, text: str) -> Any:
        try:
            return tuple(float(item) for item in text.split(","))
        except ValueError:
            return text

    def _wanted(self) -> str:
        return f"numbers above {self.low}"


class _CountsRule(_Rule):
    """A field of any number of integers of at least `low`, kept as a tuple."""

    def problem(self, value: Any) -> str | None:
        one = _Rule(int, low=self.low)
        fits = isinstance(value, tuple) and all(one.problem(item) is None for item in value)
        return None if fits else f"must be {self._wanted()}, got {shown(value)}"

    def parse(self, text: str) -> Any:
        try:
            return tuple(int(item) for item in text.split(",") if item.strip())
        except ValueError:
            return text

    def _wanted(self) -> str:
        return f"integers of at least {self.low}"


def _setting(default: Any, rule: _Rule, text: str) -> Any:
    return field(default=default, metadata={"rule": rule, "help": text})


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is built from, checked at construction.

    `EngineConfig.load` also reads a file and the environment; the constructor takes its arguments alone.

    Attributes:
        window_page: given as 0 it becomes 32, or the largest divisor that 32 shares with `block_size`.

    Raises:
        ConfigError: names every field that is wrong, one a line.
    """

    model: str = _setting("", _Rule(str), "checkpoint folder")
    backend: str = _setting("auto", _Rule(str), "a backend's name, or auto for the best one available")
    dtype: Literal["bfloat16", "float32"] = _setting(
        "bfloat16", _Rule(str, choices=("bfloat16", "float32")), "type of activations"
    )
    max_model_len: int | None = _setting(
        None, _Rule(int, low=1, optional=True), "longest prompt and answer together, in tokens; None: the model's"
    )
    max_num_seqs: int = _setting(256, _Rule(int, low=1), "requests that run at once")
    max_num_batched_tokens: int = _setting(2048, _Rule(int, low=1), "rows of one step: prefill chunks and decode rows")
    num_kv_blocks: int | None = _setting(
        None, _Rule(int, low=1, optional=True), "KV blocks; None: what the memory settings allow"
    )
    kv_memory_bytes: int | None = _setting(
        None, _Rule(int, low=1, optional=True), "bytes of KV memory; None: from memory_utilization"
    )
    memory_utilization: float = _setting(0.9, _Rule(float, low=0, high=1), "share of device memory to use in all")
    block_size: int = _setting(128, _Rule(int, low=1), "tokens in a KV block")
    window_page: int = _setting(0, _Rule(int, low=0), "tokens in a window page")
    prefix_caching: bool = _setting(
        True, _Rule(bool), "keep the KV of finished and preempted requests for prompts that begin alike"
    )
    prefix_window_pages: int | None = _setting(
        None,
        _Rule(int, low=0, optional=True),
        "window pages on top of what requests need, kept to continue stored prefixes; None: as many again",
    )
    kv_rounding: bool = _setting(True, _Rule(bool), "store KV in the formats the model was trained with")
    activation_rounding: bool | None = _setting(
        None, _Rule(bool, optional=True), "round the inputs of matmuls; None: with bfloat16 only"
    )
    batch_invariant: bool = _setting(True, _Rule(bool), "a request's bits do not depend on what else runs")
    strict: bool = _setting(False, _Rule(bool), "refuse to run an op on the slow reference")
    verify_kernels: bool = _setting(
        True, _Rule(bool), "run a kernel's own cases on this device before its first use, unless it is proven"
    )
    seed: int = _setting(0, _Rule(int, low=0, high=MAX_SEED), "where requests without a seed get theirs from")
    engram: Literal["memory", "mmap"] = _setting(
        "memory", _Rule(str, choices=("memory", "mmap")), "Engram tables in memory, or read from disk as needed"
    )
    load_draft: bool = _setting(False, _Rule(bool), "load the draft blocks (mtp.*)")
    load_vision: bool = _setting(False, _Rule(bool), "load the vision tower")
    num_threads: int | None = _setting(None, _Rule(int, low=1, optional=True), "threads on the CPU; None: torch's own")
    async_scheduling: bool | None = _setting(
        None, _Rule(bool, optional=True), "plan a step while the one before runs; None: on asynchronous devices"
    )
    speculation: Literal["off", "coupled", "rejection"] = _setting(
        "off",
        _Rule(str, choices=("off", "coupled", "rejection")),
        "draft tokens ahead; with coupled the answer is the one without",
    )
    num_drafts: int | None = _setting(
        None, _Rule(int, low=1, optional=True), "most drafts of a step; None: the draft's own block"
    )
    draft_schedule: Literal["adaptive", "fixed"] = _setting(
        "adaptive", _Rule(str, choices=("adaptive", "fixed")), "verify as many drafts as pay, or always all"
    )
    confidence_temperature: tuple[float, ...] = _setting(
        (1.0,),
        _NumbersRule(tuple, low=0),
        "divides the logits of the draft's confidences: one number, or one for each draft of a block",
    )
    sync_guard: bool = _setting(
        True, _Rule(bool), "with steps that are launched ahead, a host that waits inside a launch is an error"
    )
    graphs: bool = _setting(
        True, _Rule(bool), "capture decode steps as graphs where the device has them and every op can be captured"
    )
    graph_batch_sizes: tuple[int, ...] = _setting(
        (), _CountsRule(tuple, low=1), "row counts to capture, others are padded; none given: 1, 2, 4, then every 8"
    )
    max_graph_rows: int = _setting(512, _Rule(int, low=1), "rows of the largest step that is captured")
    replay: Literal["off", "decoder", "full"] = _setting(
        "off",
        _Rule(str, choices=("off", "decoder", "full")),
        "run only the end of a prompt in the decoder layers; full: also continue stored prefixes without their window",
    )
    replay_keep_tokens: int | None = _setting(
        None, _Rule(int, low=1, optional=True), "rows of a prompt that replay keeps; None: window + 2 * (drafts + 1)"
    )
    replay_form: Literal["compact", "mask"] = _setting(
        "compact", _Rule(str, choices=("compact", "mask")), "mask computes the dropped rows too, to check compact"
    )
    grammar_timeout: float = _setting(
        20.0, _Rule(float, low=0, high=86400), "seconds that the grammar of a structured output may take to compile"
    )
    grammar_queue_timeout: float = _setting(
        600.0, _Rule(float, low=0, high=86400), "seconds that a request may wait until its grammar begins to compile"
    )
    grammar_workers: int = _setting(1, _Rule(int, low=1, high=64), "grammars that compile at a time")
    grammar_cache_bytes: int = _setting(
        1 << 30, _Rule(int, low=0), "compiled grammars to keep for requests that ask for the same"
    )
    ops: str = _setting("", _Rule(str), "op=implementation pairs that override the choice, separated by commas")

    def __post_init__(self) -> None:
        given: Any = self.confidence_temperature
        if isinstance(given, list | int | float):  # as files and people write it
            object.__setattr__(self, "confidence_temperature", tuple(given) if isinstance(given, list) else (given,))
        sizes: Any = self.graph_batch_sizes
        if isinstance(sizes, list):
            object.__setattr__(self, "graph_batch_sizes", tuple(sizes))
        problems = [
            f"{name} {problem}" for name, rule in _RULES.items() if (problem := rule.problem(getattr(self, name)))
        ]
        if not problems:
            if self.window_page == 0:
                object.__setattr__(self, "window_page", math.gcd(DEFAULT_WINDOW_PAGE, self.block_size))
            problems = self._contradictions()
        if problems:
            raise ConfigError("\n".join([f"{len(problems)} setting(s) cannot be used:", *problems]))

    @property
    def rounds_activations(self) -> bool:
        """Whether inputs of matmuls are rounded, `activation_rounding` or what follows from `dtype`."""
        return self.dtype == "bfloat16" if self.activation_rounding is None else self.activation_rounding

    def _contradictions(self) -> list[str]:
        found = []
        if self.block_size % self.window_page:
            found.append(f"window_page must divide block_size, got {self.window_page} and {self.block_size}")
        if self.num_kv_blocks is not None and self.kv_memory_bytes is not None:
            found.append("num_kv_blocks and kv_memory_bytes both set the size of the KV cache; give one of them")
        for item in filter(None, map(str.strip, self.ops.split(","))):
            if not re.fullmatch(r"[^=\s]+\s*=\s*[^=\s]+", item):
                found.append(f"ops item {item!r} is not of the form op=implementation")
        return found

    @classmethod
    def load(
        cls,
        model: str = "",
        *,
        config: str | Path | None = None,
        environ: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> EngineConfig:
        """Merge arguments, a file and the environment, highest rank first.

        Args:
            model: the checkpoint folder; empty to take it from the file or the environment.
            config: a TOML or JSON file of field names and values, by its suffix.
            environ: variables to read; by default the process's own.
            settings: fields by name; one that is given wins, even where it equals the default.

        Raises:
            ConfigError: an unknown name, an unreadable file, or every field that is wrong; nothing else happened.
        """
        _refuse_unknown(settings, "argument")
        readers = {name: rule.parse for name, rule in _RULES.items()}
        merged = read_variables(os.environ if environ is None else environ, readers)
        if config is not None:
            merged |= _read_file(Path(config))
        merged |= settings
        if model:
            merged["model"] = model
        return cls(**merged)


_RULES: dict[str, _Rule] = {f.name: f.metadata["rule"] for f in fields(EngineConfig)}


def setting_help(name: str) -> str:
    """One line on a field, its default at the end."""
    chosen = {f.name: f for f in fields(EngineConfig)}[name]
    default = DEFAULT_WINDOW_PAGE if name == "window_page" else chosen.default
    return str(chosen.metadata["help"]) + ("" if default in (None, "", ()) else f" (default: {default})")


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Settings written as `name=value`, each value as its environment variable spells it.

    Raises:
        ConfigError: an item has another form, or names no setting; values are judged by `EngineConfig`.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"{pair!r} is not of the form name=value")
        found[name.strip()] = text
    _refuse_unknown(found, "setting")
    return {name: _RULES[name].parse(text) for name, text in found.items()}


def parse_bytes(text: str) -> int:
    """An integer, with an optional unit: 4096, 512MiB, 8g.

    Raises:
        ValueError: the text is no such number.
    """
    match = re.fullmatch(r"\s*([+-]?\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a number of bytes, such as 4096 or 8GiB")
    number, unit = match.groups()
    value = float(number) * _UNITS[unit.lower()] if "." in number else int(number) * _UNITS[unit.lower()]
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"config file {path} cannot be read as {kind}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path}: expected an object of settings, got {type(values).__name__}")
    _refuse_unknown(values, f"config file {path}: setting")
    return values


def _refuse_unknown(values: Mapping[str, Any], what: str) -> None:
    unknown = [
        f"{what} {shown(name)} is unknown{close_matches(name, list(_RULES))}" for name in values if name not in _RULES
    ]
    if unknown:
        raise ConfigError("\n".join(unknown))
