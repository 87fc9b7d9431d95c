"""Facts about a device that launches are made to measure for."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=64)
def num_processors(device: int) -> int:
    """Multiprocessors of a device, by its index."""
    return torch.cuda.get_device_properties(device).multi_processor_count
