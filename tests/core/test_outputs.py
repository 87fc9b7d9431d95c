"""Results that are brought up to date when they are read, and only then."""

import copy
import pickle
from dataclasses import asdict, replace

import pytest

from deepinfer.core.outputs import CompletionOutput


class Words:
    """A source of text that counts how often it is asked."""

    def __init__(self):
        self.ready, self.asked, self.is_finished = [], 0, False

    def read(self):
        self.asked += 1
        ready, self.ready = self.ready, []
        return "".join(ready)


def growing():
    """An answer, what it takes ids from and what it takes text from."""
    ids, words, completion = [], Words(), CompletionOutput(1)
    completion.take_ids_from(lambda have: ids[have:])
    completion.take_text_from(words)
    return completion, ids, words


def test_ids_and_text_grow_when_they_are_read() -> None:
    completion, ids, words = growing()
    ids += [5, 6]
    words.ready += ["a", "b"]
    kept = completion.token_ids
    assert (kept, completion.text) == ([5, 6], "ab")
    ids.append(7)
    assert kept == [5, 6] and completion.token_ids is kept and kept == [5, 6, 7]
    words.ready.append("c")
    assert completion.text == "abc" and words.asked == 2


def test_nobody_is_asked_before_somebody_reads() -> None:
    completion, _, words = growing()
    assert words.asked == 0
    assert completion.text == "" and words.asked == 1


def test_without_a_source_they_stay_what_they_are() -> None:
    completion, ids, words = growing()
    ids.append(5)
    words.ready.append("end")
    words.is_finished = True
    assert completion.text == completion.text == "end" and words.asked == 1
    completion.take_ids_from(None)
    ids.append(6)
    assert completion.token_ids == [5]
    completion.token_ids.append(9)
    completion.text += "!"
    assert (completion.token_ids, completion.text) == ([5, 9], "end!")


@pytest.mark.parametrize("copied", [lambda c: pickle.loads(pickle.dumps(c)), copy.copy, copy.deepcopy, replace])
def test_copies_hold_what_there_is_and_do_not_grow(copied) -> None:
    completion, ids, words = growing()
    ids.append(5)
    words.ready.append("a")
    # A source cannot be pickled: the copy must not need it.
    completion.take_ids_from(lambda have: ids[have:])
    other = copied(completion)
    ids.append(6)
    words.ready.append("b")
    assert (other.index, other.token_ids[:1], other.text) == (1, [5], "a")
    assert (completion.token_ids, completion.text) == ([5, 6], "ab")


def test_a_completion_is_an_ordinary_dataclass() -> None:
    assert CompletionOutput() == CompletionOutput(0, "", [])
    assert CompletionOutput(2, "x", [1, 2], "stop") != CompletionOutput(2, "x", [1], "stop")
    assert asdict(CompletionOutput(2, "x", [1]))["token_ids"] == [1]
    assert repr(CompletionOutput(2, "x", [1])).startswith("CompletionOutput(index=2, text='x', token_ids=[1], ")
    first, second = CompletionOutput(), CompletionOutput()
    first.token_ids.append(3)
    assert second.token_ids == []
