"""Where CANN is installed, and which one it is: read from its files, nothing of it is loaded.

Source: paths and fields as in the CANN installation guide, section "File Paths".
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Final

LEAST_VERSION: Final = (9, 2)
_HOMES: Final = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_USUAL: Final = (Path("/usr/local/Ascend/cann"), Path("/usr/local/Ascend/ascend-toolkit/latest"))


def cann_home() -> Path | None:
    """Folder of the CANN installation: what set_env.sh says, else the usual places; None where there is none."""
    named = [Path(os.environ[name]) for name in _HOMES if os.environ.get(name)]
    return next((folder for folder in (*named, *_USUAL) if folder.is_dir()), None)


def target_folder(home: Path) -> Path:
    """The part of an installation for this host's processor."""
    return home / f"{platform.machine()}-linux"


def cann_version(home: Path) -> str:
    """Version of the toolkit in an installation, such as "9.2.0"; empty when its files do not say."""
    try:
        text = (target_folder(home) / "ascend_toolkit_install.info").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"^version\s*=\s*(\S+)", text, re.MULTILINE)
    return found.group(1) if found else ""


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "9.2.RC1" gives (9, 2)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
