"""CUDA C++ written for Hopper that has no instruction of Hopper alone: the same sources serve Blackwell.

They are compiled for sm_100a and sm_103a without a GPU, checked thread by thread on the CPU, and timed on Hopper only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from deepinfer.backends import cuda_sm90
from deepinfer.backends.cuda_sm90 import index_q, kv, selection
from deepinfer.backends.cuda_sm100 import BACKEND

PORTABLE: Final = (
    ("topk_select_onepass", selection),
    ("kv_norm_rope_store_warps", kv),
    ("index_k_store_warps", kv),
    ("index_q_quant_warps", index_q),
)
"""Implementations of the Hopper backend by name, with the module that registers them."""


def _here(pattern: str) -> str:
    """A source beside the Hopper backend's modules, as seen from this folder."""
    return pattern if pattern.startswith("../") else f"../cuda_sm90/{pattern}"


def _register() -> None:
    known = {implementation.name: implementation for implementation in cuda_sm90.BACKEND.implementations}
    for name, module in PORTABLE:
        theirs = known[f"{cuda_sm90.BACKEND.name}.{name}"]
        BACKEND.implementations.append(
            replace(
                theirs,
                name=f"{BACKEND.name}.{name}",
                module=__name__,
                sources=(
                    _here(f"{module.__name__.rpartition('.')[2]}.py"),
                    *(_here(pattern) for pattern in theirs.sources),
                ),
            )
        )


_register()
