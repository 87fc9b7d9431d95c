"""Is an Ascend 950 here, and if not, what is missing: the first thing that is, with what to do about it.

Files are looked at before anything is loaded, and torch_npu is not imported: an import without a driver can end the
process.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Final

import torch

from deepinfer.backends.ascend950.host.acl import Acl
from deepinfer.backends.ascend950.host.cann import LEAST_VERSION, cann_home, cann_version, numbers
from deepinfer.ops.backend import Availability
from deepinfer.ops.errors import BackendUnavailableError

DEVICES: Final = Path("/dev")
CHIP: Final = "Ascend950"


def probe() -> Availability:
    """Whether kernels of this backend can run here."""
    return Availability(not (missing := _missing()), missing)


def _missing() -> str:
    """What is missing, and the remedy; empty when nothing is."""
    if not (DEVICES / "davinci_manager").exists():
        return f"no Ascend driver is loaded ({DEVICES}/davinci_manager is missing); install the driver and firmware"
    if not any(path.name.removeprefix("davinci").isdigit() for path in DEVICES.glob("davinci*")):
        return f"the driver is there but no device ({DEVICES}/davinci0, ...); pass devices into the container"
    return _missing_cann() or _missing_torch_npu() or _wrong_chip()


def _missing_cann() -> str:
    home = cann_home()
    least = ".".join(map(str, LEAST_VERSION))
    if home is None:
        return f"CANN is not installed or not set up; install CANN {least} or newer and run its set_env.sh"
    version = cann_version(home)
    if not version:
        return f"{home} does not say which CANN it is (ascend_toolkit_install.info); install CANN {least} or newer"
    if numbers(version) < LEAST_VERSION:
        return f"CANN {version} in {home} is too old; install CANN {least} or newer and run its set_env.sh"
    return ""


def _missing_torch_npu() -> str:
    release = torch.__version__.split("+")[0]
    try:
        version = metadata.version("torch_npu")
    except metadata.PackageNotFoundError:
        return f"torch_npu is not installed; pip install torch_npu=={release}"
    if numbers(version)[:3] != numbers(release)[:3]:
        return f"torch_npu {version} does not go with torch {release}; pip install torch_npu=={release}"
    return ""


def _wrong_chip() -> str:
    try:
        name = Acl().soc_name()
    except BackendUnavailableError as error:
        return str(error)
    if not name:
        return "the driver does not name the chip; see npu-smi info"
    return "" if name.startswith(CHIP) else f"the chip is {name}; these kernels are made for {CHIP}"
