"""Long documents in parts: within the limit, in order, with nothing but blanks lost."""

import re
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2kv_core.errors import InputError
from c2kv_core.text import ChatRenderer, document_parts
from tests.tiny_models import tiny_tokenizer

STYLES = ("smollm2", "llama3", "mistral")
LIMIT = 60
EMOJI = "👩‍🌾🌳é中"


@lru_cache
def renderer(style: str = "smollm2") -> ChatRenderer:
    return ChatRenderer(tiny_tokenizer(style))


def decoded(style: str, ids: list[int]) -> str:
    return str(renderer(style).tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def part_texts(style: str, title: str, text: str, limit: int = LIMIT) -> list[str]:
    """What stands in the turn of each part; every part is checked against the limit."""
    before, after = decoded(style, renderer(style).document_ids("", "\0")).split("\0")
    parts = document_parts(renderer(style), title, text, max_part_tokens=limit)
    assert all(0 < len(ids) <= limit for ids in parts)
    texts = [decoded(style, ids) for ids in parts]
    assert all(t.startswith(before) and t.endswith(after) for t in texts)
    return [t[len(before) : len(t) - len(after)] for t in texts]


def without_blanks(text: str) -> str:
    return re.sub(r"\s", "", text)


def paragraph(words: int, seed: int) -> str:
    return " ".join(f"oak{(seed * 31 + i) % 10}" for i in range(words)) + "."


def tokens_of(text: str) -> int:
    return len(renderer().document_ids("", text))


# ---------------------------------------------------------------- any text

texts = st.lists(
    st.one_of(
        st.sampled_from(
            ["The oak is tall. ", "Where?! ", "\n\n", "\n \n", " " * 30, "中文句子。", "«ок»", EMOJI]
        ),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        st.integers(1, 80).map("x".__mul__),
    ),
    min_size=1,
    max_size=25,
).map("".join)


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=60, deadline=None)
@given(text=texts.filter(str.strip), title=st.sampled_from(["", "Oaks", "Ок 🌳"]), limit=st.integers(40, 90))
def test_parts_keep_limit_order_and_text(style: str, text: str, title: str, limit: int) -> None:
    made = part_texts(style, title, text, limit)
    head = f"{title}\n\n" if title else ""
    assert all(part.startswith(head) for part in made)
    bodies = [part[len(head) :] for part in made]
    assert all(body.strip() for body in bodies)
    assert without_blanks("".join(bodies)) == without_blanks(text)
    position = 0
    for body in bodies:
        # Every part is a piece of the source as it stands there, blanks inside included.
        position = text.index(body.strip(), position) + len(body.strip())


def test_a_document_that_fits_is_one_part() -> None:
    text = paragraph(3, 1)
    whole = renderer().document_ids("Oaks", text)
    assert document_parts(renderer(), "Oaks", text, max_part_tokens=len(whole)) == [whole]
    assert len(document_parts(renderer(), "Oaks", text, max_part_tokens=len(whole) - 1)) == 2


# ---------------------------------------------------------------- where parts are cut


def test_cuts_at_paragraphs_are_preferred() -> None:
    # Each begins with a sentence so short that it still fits into the part before.
    paragraphs = [f"Oak {i}. {paragraph(14 + i % 2, i)}" for i in range(8)]
    limit = max(map(tokens_of, paragraphs)) + 9
    assert tokens_of(paragraphs[0]) + tokens_of("Oak 1. x") - tokens_of("") + 1 <= limit
    assert part_texts("smollm2", "", "\n\n".join(paragraphs), limit) == paragraphs


def test_else_cuts_are_at_sentences() -> None:
    sentences = [paragraph(9, i) for i in range(8)]
    limit = max(map(tokens_of, sentences)) + 6
    assert part_texts("smollm2", "", " ".join(sentences), limit) == sentences


def test_sentences_of_scripts_without_blanks_are_cut_at_their_ends() -> None:
    sentences = ["橡树很高大。", "白桦是白的！", "它长在哪里？"] * 4
    made = part_texts("smollm2", "", "".join(sentences), 45)
    assert len(made) > 3
    assert all(part[-1] in "。！？" for part in made)


def test_a_huge_word_is_cut_at_tokens() -> None:
    made = part_texts("smollm2", "", "x" * 700)
    assert "".join(made) == "x" * 700
    assert len(made) <= 2 + 700 // 40


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("shift", range(4))
def test_no_character_of_several_tokens_is_cut_apart(style: str, shift: int) -> None:
    text = "x" * shift + EMOJI * 60
    made = part_texts(style, "", text)
    assert "".join(made) == text
    assert not any("�" in part for part in made)


def test_parts_are_about_as_long_as_they_may_be() -> None:
    text = " ".join(paragraph(5, i) for i in range(60))
    made = part_texts("smollm2", "Oaks", text)
    assert min(map(tokens_of, made[:-1])) > LIMIT // 2


def test_long_runs_of_blanks_make_no_parts_of_their_own() -> None:
    made = part_texts("smollm2", "Oaks", "An oak." + " \n" * 300 + "A birch." + "\t" * 300)
    assert made == ["Oaks\n\nAn oak.", "Oaks\n\nA birch."]


# ---------------------------------------------------------------- titles and refusals


def test_a_long_title_is_text_like_any_other() -> None:
    title = " ".join(f"Oaks{i}" for i in range(40))
    made = part_texts("smollm2", title, "An oak. " * 30)
    assert without_blanks("".join(made)) == without_blanks(title + "An oak. " * 30)


def test_a_title_of_blanks_is_none() -> None:
    assert part_texts("smollm2", " \n", "An oak. " * 40) == part_texts("smollm2", "", "An oak. " * 40)


@pytest.mark.parametrize("text", ["", "  \n\t "])
def test_a_document_without_text_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="no text"):
        document_parts(renderer(), "Oaks", text, max_part_tokens=LIMIT)


def test_a_limit_without_room_for_text_is_refused() -> None:
    with pytest.raises(InputError, match="max_part_tokens 5 "):
        document_parts(renderer(), "", "An oak. " * 40, max_part_tokens=5)


def test_control_strings_count_as_the_text_they_are() -> None:
    text = "<|im_end|> " * 60
    assert without_blanks("".join(part_texts("smollm2", "", text))) == without_blanks(text)
