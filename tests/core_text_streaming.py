"""Answers as they come: the same text as a whole decode, and never a character beyond a stop string."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from c2kv_core.text import TextStream
from tests.tiny_models import STYLES, tiny_tokenizer


def encoded(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def by_character(text: str) -> list[int]:
    """Ids that spell a text one character (one byte) at a time."""
    tokenizer = tiny_tokenizer()
    return [i for character in text for i in encoded(tokenizer, character)]


def shown(stream: TextStream, ids: Sequence[int]) -> list[str]:
    """What each token shows, and the end."""
    return [*(stream.push(i) for i in ids), stream.finish()]


# ---------------------------------------------------------------- without stop strings


BYTE_LEVEL = [name for name, style in STYLES.items() if style.sentencepiece == "no"]


@pytest.mark.parametrize("style", BYTE_LEVEL)
@settings(max_examples=150, deadline=None)
@given(draw=st.lists(st.integers(0, 10_000), max_size=40))
def test_any_ids_read_as_in_a_whole_decode(style: str, draw: list[int]) -> None:
    tokenizer = tiny_tokenizer(style)
    ids = [i % len(tokenizer) for i in draw]
    stream = TextStream(tokenizer)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(shown(stream, ids)) == whole
    assert stream.text == whole


@pytest.mark.parametrize("style", [name for name in STYLES if name not in BYTE_LEVEL])
@settings(max_examples=150, deadline=None)
@given(draw=st.lists(st.integers(0, 10_000), max_size=40))
@example(draw=[7, 135, 263])
def test_bytes_that_spell_nothing_do_not_end_the_answer(style: str, draw: list[int]) -> None:
    # These decoders take back good bytes once a bad one follows, which a stream cannot do.
    tokenizer = tiny_tokenizer(style)
    stream = TextStream(tokenizer)
    pieces = shown(stream, [i % len(tokenizer) for i in draw] + encoded(tokenizer, "the oak"))
    assert "".join(pieces) == stream.text
    assert stream.text.endswith("the oak")


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=40, deadline=None)
@given(
    text=st.text(
        st.one_of(st.sampled_from("oak .\n🌳é中"), st.characters(exclude_categories=["Cs"])), max_size=30
    )
)
def test_any_text_comes_back(style: str, text: str) -> None:
    tokenizer = tiny_tokenizer(style)
    ids = encoded(tokenizer, text)
    assert "".join(shown(TextStream(tokenizer), ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("style", STYLES)
def test_a_character_is_shown_once_it_is_complete(style: str) -> None:
    tokenizer = tiny_tokenizer(style)
    ids = encoded(tokenizer, "a🌳b")
    pieces = shown(TextStream(tokenizer), ids)
    assert "".join(pieces) == "a🌳b"
    assert not any("�" in piece for piece in pieces)
    assert sum("🌳" in piece for piece in pieces) == 1


def test_bytes_that_never_become_a_character_show_at_the_end() -> None:
    tokenizer = tiny_tokenizer()
    ids = encoded(tokenizer, "a🌳")[:-1]
    *pieces, last = shown(TextStream(tokenizer), ids)
    assert "".join(pieces) == "a"
    assert "a" + last == tokenizer.decode(ids)


def test_special_tokens_are_not_shown() -> None:
    tokenizer = tiny_tokenizer()
    assert "".join(shown(TextStream(tokenizer), [1, *encoded(tokenizer, "oak"), 2])) == "oak"


def test_a_stream_that_ends_at_once_is_empty() -> None:
    assert TextStream(tiny_tokenizer()).finish() == ""


# ---------------------------------------------------------------- stop strings

letters = st.text("ab\n", max_size=14)
stops = st.lists(st.text("ab\n", max_size=4), max_size=3)


@settings(max_examples=200, deadline=None)
@given(text=letters, stop=stops)
@example(text="aabaab", stop=["aab"])
@example(text="abab", stop=["abb", "ba"])
def test_text_ends_before_a_stop_string(text: str, stop: list[str]) -> None:
    stream = TextStream(tiny_tokenizer(), stop)
    wanted = [s for s in stop if s]
    # The stop string that is complete first ends the text; of several complete at once, the one that starts first.
    ends = [text.find(s) + len(s) for s in wanted if s in text]
    cut = min(text.find(s) for s in wanted if s in text[: min(ends)]) if ends else len(text)
    so_far = ""
    for i in by_character(text):
        so_far += stream.push(i)
        assert text[:cut].startswith(so_far)
        assert stream.text == so_far
    so_far += stream.finish()
    assert so_far == text[:cut]
    assert stream.stopped == bool(ends)


@settings(max_examples=60, deadline=None)
@given(text=st.text("oaks The🌳é.\n", max_size=30), stop=st.text("oaks The🌳é.\n", min_size=1, max_size=5))
def test_stop_strings_reach_across_and_into_tokens(text: str, stop: str) -> None:
    tokenizer = tiny_tokenizer()
    stream = TextStream(tokenizer, [stop])
    pieces = shown(stream, encoded(tokenizer, text))
    assert "".join(pieces) == text.partition(stop)[0]
    assert stream.stopped == (stop in text)


def test_a_partial_stop_is_held_back_and_then_released() -> None:
    stream = TextStream(tiny_tokenizer(), ["abc"])
    assert [stream.push(i) for i in by_character("xabd")] == ["x", "", "", "abd"]
    assert [stream.push(i) for i in by_character("ab")] == ["", ""]
    assert stream.finish() == "ab"
    assert not stream.stopped


def test_nothing_is_shown_after_a_stop() -> None:
    stream = TextStream(tiny_tokenizer(), ["b"])
    assert [stream.push(i) for i in by_character("abca")] == ["a", "", "", ""]
    assert stream.stopped and stream.text == "a"
    assert stream.finish() == ""


def test_empty_stop_strings_stop_nothing() -> None:
    stream = TextStream(tiny_tokenizer(), [""])
    assert "".join(shown(stream, by_character("ab"))) == "ab"


def test_a_stop_string_completed_by_the_end_is_not_shown() -> None:
    tokenizer = tiny_tokenizer()
    stream = TextStream(tokenizer, ["�"])
    assert "".join(shown(stream, encoded(tokenizer, "a🌳")[:-1])) == "a"
    assert stream.stopped
