"""Budgets of all kernels, a file per family of kernel text."""

from __future__ import annotations

from typing import Final

from deepinfer.backends.ascend950.budget import Budget
from deepinfer.backends.ascend950.budgets import generated, norm, products

ALL: Final[tuple[Budget, ...]] = (*norm.BUDGETS, *products.BUDGETS, *generated.BUDGETS)
