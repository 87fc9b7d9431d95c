"""A vocabulary whose tokens say something, grammars of it compiled once, and engines that share them."""

from collections.abc import Iterator

import pytest

from deepinfer.core.grammar.service import GrammarService
from deepinfer.core.grammar.vocabulary import GrammarVocabulary
from deepinfer.core.tokenizer import Tokenizer

VOCAB, EOS, THINK, END_THINK, DSML = 384, 1, 376, 377, 378


@pytest.fixture(scope="session")
def tokenizer(pytestconfig) -> Tokenizer:
    return Tokenizer.from_dir(pytestconfig.rootpath / "tests" / "data")


@pytest.fixture(scope="session")
def vocabulary(tokenizer) -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer, VOCAB, (EOS,))


@pytest.fixture(scope="session")
def grammars(tokenizer) -> Iterator[GrammarService]:
    """One worker process for all tests."""
    service = GrammarService(tokenizer, VOCAB, (EOS,), timeout=60)
    yield service
    service.close()
