"""`config.json` as it stands in a checkpoint folder: read once the same way, before anybody asks which model it is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer.models.errors import ConfigError
from deepinfer.ops.show import shown

CONFIG_FILE = "config.json"


def read_config(folder: str | Path) -> Mapping[str, Any]:
    """The JSON object in a folder's `config.json`.

    Raises:
        ConfigError: the file is absent, is not JSON, or holds something else than an object.
    """
    file = Path(folder) / CONFIG_FILE
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(str(file), ["no such file; a checkpoint folder needs its config.json"]) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(str(file), [f"cannot be read as JSON ({error}); fetch the file again"]) from error
    if not isinstance(data, dict):
        what = "null" if data is None else shown(data)
        raise ConfigError(str(file), [f"the file holds {what}; it must hold a JSON object"])
    return data
