"""Tasks whose answers a rule can check: made without data files, in English and Chinese, for training and evaluation.

An item depends on (task, split, seed, number) alone. Which words, names and numbers decide an answer is split by their
content (`atoms`), so that no seed can carry one from training to evaluation.
"""

from deepinfer.entrypoints.eval_tasks.item import Answer, Call, Item
from deepinfer.entrypoints.eval_tasks.suite import SUITES, TASKS, TaskSpec, make_item, make_items

__all__ = ["SUITES", "TASKS", "Answer", "Call", "Item", "TaskSpec", "make_item", "make_items"]
