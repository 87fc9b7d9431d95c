"""Writes `docs/configuration.md` from the settings themselves: `python tools/configuration_table.py`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer

from deepinfer.core.config import DEFAULT_WINDOW_PAGE, EngineConfig
from deepinfer.core.environment import PREFIX, TRANSLATED, WITHOUT_MEANING
from deepinfer.entrypoints.cli import app

TARGET = Path(__file__).parents[1] / "docs" / "configuration.md"

_HEAD = """# Configuration

Printed by `tools/configuration_table.py` from `core/config.py`, `core/environment.py` and the command line; a test
holds this page against them.

An engine's settings are one validated object, `EngineConfig`, built from these sources; an earlier one goes before a
later one:

1. arguments: `LLM(model, max_num_seqs=8)`, `AsyncLLM(...)` alike, or flags of `deepinfer run`;
2. a TOML or JSON file: `LLM(model, config="engine.toml")`, `deepinfer run --config engine.toml`;
3. environment variables, ours before those of DeepSeek's DeepInfer;
4. defaults.

Everything that is wrong is named at once, before anything is loaded. An unknown name is an error in arguments and
files, and a warning in the environment.

## Settings

The name is that of the argument and of the key in a file. Integers may have a unit where they are text: `8GiB`, `512k`.
What has no flag of its own is set by `--set NAME=VALUE`. `--num-speculative-tokens` is `--num-drafts`, and
`--speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'`, as vLLM spells it, is `--speculation coupled`
with `--num-drafts 3`; our own flags go before it. `DEEPINFER_CACHE_DIR`, where compiled kernels and verdicts on them
are kept, is no setting of an engine and has no other name.

"""
_THEIRS = """
## Variables of DeepSeek's DeepInfer

They are honoured, so that scripts keep working. Each is a default for the settings it names: `DEEPINFER_` and our own
name go before it.

| variable | setting | value |
|---|---|---|
"""
_WITHOUT = """
These have no effect, and warn unless their value asks for what happens anyway:

| variable | why |
|---|---|
"""


def page() -> str:
    """The whole page."""
    hints = get_type_hints(EngineConfig)
    flags = _flags()
    lines = ["| setting | type | default | flag | variables | meaning |", "|---" * 6 + "|"]
    for field in fields(EngineConfig):
        name = field.name
        default = DEFAULT_WINDOW_PAGE if name == "window_page" else field.default
        theirs = [variable.name for variable in TRANSLATED if name in variable.fields]
        cells = (
            f"`{name}`",
            _type(hints[name]),
            f"`{_spelled(default)}`" if default not in ("", ()) else "empty",
            f"`{flags[name]}`" if name in flags else "`--set`",
            ", ".join(f"`{PREFIX}{variable}`" for variable in (name.upper(), *theirs)),
            field.metadata["help"],
        )
        lines.append("| " + " | ".join(cells) + " |")
    theirs_rows = [
        f"| `{PREFIX}{v.name}` | {', '.join(f'`{name}`' for name in v.fields)} | {v.meaning} |" for v in TRANSLATED
    ]
    without_rows = [
        f"| {', '.join(f'`{PREFIX}{name}`' for name in group.names)} | {group.reason} |" for group in WITHOUT_MEANING
    ]
    return (
        _HEAD
        + "\n".join(lines)
        + "\n"
        + _THEIRS
        + "\n".join(theirs_rows)
        + "\n"
        + _WITHOUT
        + "\n".join(without_rows)
        + "\n"
    )


def _flags() -> dict[str, str]:
    """The flag of each setting that has one in `deepinfer run`."""
    run = vars(typer.main.get_command(app))["commands"]["run"]
    known = {field.name for field in fields(EngineConfig)}
    return {
        param.name: "/".join((param.opts[0], *param.secondary_opts))
        for param in run.params
        if param.name in known and param.opts[0].startswith("--")
    }


def _type(hint: Any) -> str:
    """A type as a reader would say it."""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if isinstance(hint, UnionType):
        return " or ".join("none" if part is NoneType else _type(part) for part in get_args(hint))
    words = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return words.get(hint, "one number or several")


def _spelled(value: object) -> str:
    """A default as a variable would spell it."""
    if isinstance(value, tuple):
        return ",".join(map(_spelled, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
