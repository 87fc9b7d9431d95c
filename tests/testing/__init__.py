"""Props for tests of the engine and of users' pipelines: models whose logits are scripted."""

from deepinfer.testing.puppet import NullModel, PuppetModel

__all__ = ["NullModel", "PuppetModel"]
