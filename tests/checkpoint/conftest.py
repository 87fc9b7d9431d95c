"""The small checkpoint of the repository, and the tools beside it, which are no part of the installed package."""

import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))


@pytest.fixture(scope="session")
def tiny():
    """Folder of the checkpoint."""
    return REPOSITORY / "assets" / "deepinfer-tiny"


@pytest.fixture(scope="session")
def repository():
    return REPOSITORY
