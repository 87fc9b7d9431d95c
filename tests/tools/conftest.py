"""The training tools are no part of the installed package: they are imported from the root of the repository."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors gain nothing from a second thread, and sums keep their order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """A folder with the tokenizer of the mini configuration."""
    from deepinfer.core.tokenizer import TOKENIZER_FILE
    from tools.train_tiny.settings import MINI_VOCAB
    from tools.train_tiny.vocab import train_tokenizer

    folder = tmp_path_factory.mktemp("train_tiny")
    tokenizer = train_tokenizer(MINI_VOCAB, items_per_task=20)
    (folder / TOKENIZER_FILE).write_text(tokenizer.to_str(), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def encoder(run_folder):
    from deepinfer.core.tokenizer import Tokenizer

    return Tokenizer.from_dir(run_folder)


@pytest.fixture(scope="session")
def config(encoder):
    """Content of the mini configuration's `config.json`."""
    from tools.train_tiny.settings import MINI, model_config

    return model_config(MINI, encoder, encoder.token_to_id("<｜noise｜>"))
