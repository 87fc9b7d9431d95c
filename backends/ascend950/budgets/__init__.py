"""Budgets of all kernels, a file per family of kernel text."""

from __future__ import annotations

from typing import Final

from deepinfer.backends.ascend950.budget import Budget
from deepinfer.backends.ascend950.budgets import (
    attention,
    compress,
    engram,
    experts,
    generated,
    heads,
    kv_store,
    norm,
    products,
    sampling,
    scores,
    selection,
    step,
    vision,
)

ALL: Final[tuple[Budget, ...]] = (
    *attention.BUDGETS,
    *norm.BUDGETS,
    *products.BUDGETS,
    *generated.BUDGETS,
    *kv_store.BUDGETS,
    *compress.BUDGETS,
    *engram.BUDGETS,
    *step.BUDGETS,
    *vision.BUDGETS,
    *selection.BUDGETS,
    *sampling.BUDGETS,
    *experts.BUDGETS,
    *scores.BUDGETS,
    *heads.BUDGETS,
)
