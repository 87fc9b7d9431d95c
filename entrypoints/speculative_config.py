"""`--speculative-config` as vLLM spells it, for scripts that come from there: what it says in our own settings."""

from __future__ import annotations

import json
from typing import Any, Final

from deepinfer.core.errors import ConfigError
from deepinfer.ops.show import shown

_METHODS: Final = ("mtp", "deepseek_mtp")
_OURS: Final = "use --speculation and --num-drafts, or --set for the settings of docs/configuration.md"


def read_speculative_config(text: str) -> dict[str, Any]:
    """The settings that a configuration stands for: `speculation=coupled`, and `num_drafts` where it names a number.

    Args:
        text: JSON, such as `{"method": "mtp", "num_speculative_tokens": 3}`.

    Returns:
        Settings by name; their values are judged by `EngineConfig`.

    Raises:
        ConfigError: it is no object of these two keys, or names a draft other than the checkpoint's own.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--speculative-config is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"--speculative-config must be a JSON object, got {shown(given)}")
    unknown = given.keys() - {"method", "num_speculative_tokens"}
    if unknown:
        raise ConfigError(
            f"--speculative-config: {', '.join(map(shown, sorted(unknown)))} has no meaning here; {_OURS}"
        )
    method = given.get("method", "mtp")
    if method not in _METHODS:
        raise ConfigError(
            f"--speculative-config: method {shown(method)} is not there; drafts come from the checkpoint's own blocks "
            f"({', '.join(_METHODS)})"
        )
    settings: dict[str, Any] = {"speculation": "coupled"}
    if "num_speculative_tokens" in given:
        settings["num_drafts"] = given["num_speculative_tokens"]
    return settings
