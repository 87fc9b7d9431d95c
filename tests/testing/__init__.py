"""Props for tests of the engine and of users' pipelines: scripted models and drafts, and random workloads."""

from deepinfer.testing.hash_model import HashModel
from deepinfer.testing.puppet import NullModel, PuppetModel
from deepinfer.testing.scripted_draft import ScriptedDraft

__all__ = ["HashModel", "NullModel", "PuppetModel", "ScriptedDraft"]
