"""Host arrays on their way to the device, in one place because of one rule.

Where memory is unified the device tensor is the host array itself: an array that an op will write is sent as a copy if
the host reads it again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.ops.runtime import Runtime


def send(runtime: Runtime, array: NDArray[Any]) -> Tensor:
    """A host array on the device, of the same shape and dtype."""
    return runtime.to_device(torch.from_numpy(np.ascontiguousarray(array)))
