"""Streamed text: whole characters, nothing twice, and the same as decoding at once."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepinfer.core.detokenizer import IncrementalDetokenizer
from deepinfer.core.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_dir(Path(__file__).parent.parent / "data")
BYTE_IDS = {TOKENIZER.id_to_bytes(i): i for i in range(TOKENIZER.vocab_size) if len(TOKENIZER.id_to_bytes(i)) == 1}
EURO = [BYTE_IDS[bytes([byte])] for byte in "€".encode()]
A = BYTE_IDS[b"A"]
EOS = TOKENIZER.eos_token_id

token_ids = st.one_of(
    st.lists(st.integers(0, TOKENIZER.vocab_size), max_size=10),
    st.lists(st.sampled_from(sorted(BYTE_IDS.values())), max_size=10),
    st.text(max_size=6).map(lambda text: [BYTE_IDS[bytes([byte])] for byte in text.encode()]),
)


def byte_ids(data: bytes) -> list[int]:
    return [BYTE_IDS[bytes([byte])] for byte in data]


def test_holds_back_half_a_character() -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    assert [detokenizer.feed([i]) for i in [A, *EURO]] == ["A", "", "", "€"]
    assert detokenizer.offsets == [1, 1, 1, 2]
    assert detokenizer.finish() == ""


def test_takes_several_ids_at_once() -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    assert detokenizer.feed([A, *EURO, EURO[0]]) == "A€"
    assert detokenizer.feed([]) == ""
    assert detokenizer.feed(EURO[1:]) == "€"


def test_finish_shows_what_was_never_completed() -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    assert detokenizer.feed([A, *EURO[:2]]) == "A"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.offsets == [1, 1, 2]
    assert detokenizer.finish() == ""
    with pytest.raises(RuntimeError, match="after finish"):
        detokenizer.feed([A])


@settings(deadline=None)
@given(token_ids, st.booleans(), st.sets(st.sampled_from(sorted(TOKENIZER.special_ids)), max_size=3), st.data())
def test_pieces_join_to_one_shot_decode(ids: list[int], skip: bool, keep: set[int], data: st.DataObject) -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER, skip, keep_ids=keep)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    pieces = [detokenizer.feed(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    given_out = "".join(pieces)
    whole = TOKENIZER.decode(ids, skip, keep_ids=keep)
    assert whole.startswith(given_out)
    assert given_out + detokenizer.finish() == whole
    assert detokenizer.num_chars == len(whole)


@settings(deadline=None)
@given(token_ids)
def test_offsets_say_where_each_token_ends(ids: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    text, ends = "", []
    for token_id in ids:
        text += detokenizer.feed([token_id])
        ends.append(len(text))
    assert detokenizer.offsets == ends
    text += detokenizer.finish()
    assert len(detokenizer.offsets) == len(ids)
    assert not ids or detokenizer.offsets[-1] == len(text)

    at_once = IncrementalDetokenizer(TOKENIZER)
    at_once.feed(ids)
    at_once.finish()
    assert at_once.offsets == detokenizer.offsets


def test_a_stop_string_inside_an_accepted_block_names_its_token() -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    ids = byte_ids(b"ab;;cd")
    text = detokenizer.feed(ids)
    stop_end = text.index(";;") + 2
    last = next(i for i, offset in enumerate(detokenizer.offsets) if offset >= stop_end)
    assert last == 3
    assert TOKENIZER.decode(ids[: last + 1]) == "ab;;"


def test_prompt_ending_inside_a_character_is_not_repeated() -> None:
    """ST-3."""
    prompt = [*TOKENIZER.encode("a long prompt "), *EURO[:2]]
    detokenizer = IncrementalDetokenizer(TOKENIZER, prompt_tail_ids=prompt)
    assert detokenizer.feed([EURO[2]]) == "€"
    assert detokenizer.feed([A]) == "A"
    assert detokenizer.offsets == [1, 2]
    assert detokenizer.finish() == ""


def test_prompt_bytes_alone_are_never_shown() -> None:
    def texts(ids: list[int]) -> tuple[str, str]:
        detokenizer = IncrementalDetokenizer(TOKENIZER, prompt_tail_ids=[A, *EURO[:1]])
        return detokenizer.feed(ids), detokenizer.finish()

    assert texts([]) == ("", "")
    assert texts([A]) == ("A", "")
    assert texts([EOS]) == ("", "")
    assert texts([EURO[1], A]) == ("\ufffdA", "")  # one of the two broken bytes was generated
    assert texts([EURO[1]]) == ("", "\ufffd")
    assert texts([EURO[0], *EURO]) == ("\ufffd€", "")


def test_generated_replacement_character_survives_a_split_with_the_prompt() -> None:
    first, *rest = byte_ids("\ufffd".encode())
    detokenizer = IncrementalDetokenizer(TOKENIZER, prompt_tail_ids=[first])
    assert detokenizer.feed(rest) == "\ufffd"


def test_a_control_token_ends_the_prompts_character() -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER, prompt_tail_ids=[*EURO[:2], TOKENIZER.bos_token_id])
    assert detokenizer.feed([EURO[2]]) == "\ufffd"


@settings(deadline=None)
@given(st.text(max_size=5), st.text(max_size=5), st.integers(0, 30))
@example("", "€", 2)
@example("x", "\U0001f600", 4)
def test_a_text_cut_anywhere_between_prompt_and_output(left: str, right: str, cut: int) -> None:
    ids = byte_ids((left + right).encode())
    prompt, output = ids[:cut], ids[cut:]
    detokenizer = IncrementalDetokenizer(TOKENIZER, prompt_tail_ids=prompt)
    shown = detokenizer.feed(output) + detokenizer.finish()
    whole_before = b"".join(map(TOKENIZER.id_to_bytes, prompt)).decode("utf-8", "ignore")
    expected = (left + right)[len(whole_before) :] if output else ""
    assert shown == expected


def test_special_tokens_are_hidden_wherever_a_draft_puts_them() -> None:
    """LC-4: whole accepted blocks with control tokens in them."""
    control = sorted(TOKENIZER.special_ids)
    block = [A, EOS, *control, A, TOKENIZER.bos_token_id, A]
    hidden = IncrementalDetokenizer(TOKENIZER)
    assert hidden.feed(block) + hidden.finish() == "AAA"
    assert hidden.offsets == [1] * (len(control) + 2) + [2, 2, 3]

    shown = IncrementalDetokenizer(TOKENIZER, skip_special_tokens=False)
    assert shown.feed([A, EOS]) == "A<｜end▁of▁sentence｜>"

    end_think = TOKENIZER.token_to_id("</think>")
    assert end_think is not None
    kept = IncrementalDetokenizer(TOKENIZER, keep_ids={end_think})
    assert kept.feed([A, end_think, A, EOS]) == "A</think>A"


def test_ids_beyond_the_vocabulary_leave_no_text() -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    assert detokenizer.feed([A, 100_000, A]) == "AA"
    assert detokenizer.offsets == [1, 1, 2]
