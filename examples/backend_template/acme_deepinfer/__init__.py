"""Acme devices for deepinfer: three ops of its own, the rest from the reference. Copy this folder and rename it.

The invented device is host memory, so that the template runs on a laptop.
"""

from deepinfer.ops.backend import Availability, Backend
from deepinfer.ops.runtime import Runtime


def _probe() -> Availability:
    # Look for the vendor's library, a driver, a device file; import no kernels here. For an invented device:
    #     if find_spec("acme_rt") is None:
    #         return Availability(False, "acme_rt is not installed; pip install acme-rt")
    return Availability(True)


def _runtime() -> Runtime:
    from deepinfer.ops.host import HostRuntime  # your own class goes here: docs/backends.md, "Runtime"

    return HostRuntime()


BACKEND = Backend(
    "acme",
    device_type="cpu",  # what `tensor.device.type` says on your device
    probe=_probe,
    op_modules=("acme_deepinfer.index", "acme_deepinfer.norm"),
    runtime=_runtime,
    priority=-1,  # below 0: `auto` never chooses it, only its name does
    api_version=1,
)
