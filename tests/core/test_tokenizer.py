"""Text and ids: exact bytes both ways, and control tokens only where they were meant."""

import copy
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.core.tokenizer import Tokenizer, TokenizerError

DATA = Path(__file__).parent.parent / "data"
DEFINITION = json.loads((DATA / "tokenizer.json").read_text(encoding="utf-8"))
LIBRARY = tokenizers.Tokenizer.from_file(str(DATA / "tokenizer.json"))
TOKENIZER = Tokenizer.from_dir(DATA)
CONTROL = [token["content"] for token in DEFINITION["added_tokens"]]

typed_text = st.lists(st.one_of(st.text(), st.sampled_from(CONTROL)), max_size=6).map("".join)
token_ids = st.integers(0, TOKENIZER.vocab_size - 1)


def write(folder: Path, text: str) -> Path:
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    return folder


def test_knows_its_size_and_named_tokens() -> None:
    assert TOKENIZER.vocab_size == 384
    assert (TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id) == (0, 1, 2)
    assert TOKENIZER.special_ids == {0, 1, 2, *range(373, 384)}
    assert TOKENIZER.token_to_id("<｜User｜>") == 373
    assert TOKENIZER.token_to_id("<｜nobody｜>") is None


def test_named_tokens_may_be_given_by_id_or_text() -> None:
    tokenizer = Tokenizer.from_dir(DATA, bos=373, eos="<｜Assistant｜>", pad=5)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (373, 374, 5)
    with pytest.raises(TokenizerError, match=r"eos token 9999 is not in the vocabulary"):
        Tokenizer.from_dir(DATA, eos=9999)
    with pytest.raises(TokenizerError, match=r"pad token '<pad>' is not in the vocabulary"):
        Tokenizer.from_dir(DATA, pad="<pad>")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "expected a BPE model"),
        (json.dumps({**DEFINITION, "decoder": None}), "byte-level"),
        (json.dumps({**DEFINITION, "pre_tokenizer": {"type": "Nonsense"}}), "not a usable tokenizer"),
        (json.dumps({**DEFINITION, "added_tokens": [{"content": "x"}]}), "added_tokens"),
    ],
)
def test_broken_file_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(TokenizerError, match=problem) as caught:
        Tokenizer.from_dir(write(tmp_path, text))
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


def test_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no such file") as caught:
        Tokenizer.from_dir(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


@settings(deadline=None)
@given(typed_text)
def test_typed_control_tokens_stay_text(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert not TOKENIZER.special_ids.intersection(ids)
    assert TOKENIZER.decode(ids) == text
    assert b"".join(map(TOKENIZER.id_to_bytes, ids)) == text.encode()


@settings(deadline=None)
@given(typed_text)
def test_parsed_control_tokens_are_the_library_s(text: str) -> None:
    ids = TOKENIZER.encode(text, parse_special=True)
    assert ids == LIBRARY.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert TOKENIZER.special_ids.isdisjoint(ids) == (not any(token in text for token in CONTROL))


@settings(deadline=None)
@given(st.text())
def test_text_without_control_tokens_is_cut_as_the_library_does(text: str) -> None:
    if not any(token in text for token in CONTROL):
        assert TOKENIZER.encode(text) == LIBRARY.encode(text, add_special_tokens=False).ids


@settings(deadline=None)
@given(st.lists(token_ids, max_size=12))
def test_decode_is_the_library_s(ids: list[int]) -> None:
    assert TOKENIZER.decode(ids) == LIBRARY.decode(ids, skip_special_tokens=True)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == LIBRARY.decode(ids, skip_special_tokens=False)


def test_end_of_sequence_is_hidden_unless_asked_for() -> None:
    """D-12."""
    ids = [TOKENIZER.bos_token_id, *TOKENIZER.encode("done"), TOKENIZER.eos_token_id]
    assert TOKENIZER.decode(ids) == "done"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "<｜begin▁of▁sentence｜>done<｜end▁of▁sentence｜>"
    assert TOKENIZER.decode(ids, keep_ids={TOKENIZER.eos_token_id}) == "done<｜end▁of▁sentence｜>"


def test_single_tokens_show_bytes_spelling_and_text() -> None:
    for token_id in range(TOKENIZER.vocab_size):
        assert TOKENIZER.decode_single_with_special(token_id) == LIBRARY.decode([token_id], skip_special_tokens=False)
        assert TOKENIZER.raw_spelling(token_id) == LIBRARY.id_to_token(token_id)
    the = TOKENIZER.token_to_id("Ġthe")
    assert the is not None
    assert TOKENIZER.id_to_bytes(the) == b" the"
    assert TOKENIZER.id_to_bytes(373) == "<｜User｜>".encode()
    single_bytes = {TOKENIZER.id_to_bytes(token_id) for token_id in range(TOKENIZER.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= single_bytes


def test_an_id_without_token_has_no_text_and_no_spelling() -> None:
    assert TOKENIZER.id_to_bytes(384) == b""
    assert TOKENIZER.decode([67, 384, 68]) == "ab"
    with pytest.raises(TokenizerError, match="no token has id 384"):
        TOKENIZER.raw_spelling(384)


def test_lone_surrogates_become_replacement_characters() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a\ufffdb"
    assert TOKENIZER.decode(TOKENIZER.encode("\ud83d\ude00")) == "\U0001f600"


def test_control_token_reachable_by_merges_stays_unreachable_for_users() -> None:
    definition = copy.deepcopy(DEFINITION)
    model = definition["model"]
    model["vocab"] |= {"<t": 384, "<think>": 376, "hi": 385, "hink": 386, "hink>": 387, "nk": 388}
    model["merges"] += [["<", "t"], ["h", "i"], ["n", "k"], ["hi", "nk"], ["hink", ">"], ["<t", "hink>"]]
    model["ignore_merges"] = True
    definition["pre_tokenizer"]["pretokenizers"].pop(0)  # keep "<think>" one word
    raw = copy.deepcopy(definition)
    raw["added_tokens"] = []
    assert 376 in tokenizers.Tokenizer.from_str(json.dumps(raw)).encode("<think>").ids

    tokenizer = Tokenizer(definition)
    assert 376 not in tokenizer.encode("<think>")
    assert tokenizer.decode(tokenizer.encode("<think>")) == "<think>"
    assert tokenizer.encode("<think>", parse_special=True) == [376]
    assert tokenizer.token_to_id("<｜noise｜>") == 383  # numbered as the file says, not behind the longer vocabulary


def test_control_tokens_not_flagged_special_are_still_control() -> None:
    definition = copy.deepcopy(DEFINITION)
    for token in definition["added_tokens"]:
        token["special"] = False
    definition["added_tokens"].append(
        {"id": 384, "content": "øy", "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": True, "special": False}
    )
    tokenizer = Tokenizer(definition)
    assert tokenizer.special_ids == TOKENIZER.special_ids
    assert tokenizer.encode("øy") == [384]
    assert tokenizer.id_to_bytes(384) == "øy".encode()  # an added token is spelled as it reads
