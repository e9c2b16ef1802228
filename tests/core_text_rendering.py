"""Segments of conversations: they add up to the chat template's own ids, and content never becomes control."""

from collections.abc import Sequence
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from c2kv_core.errors import TemplateError
from c2kv_core.text import ChatRenderer, Message, content_hash, document_content
from tests.tiny_models import STYLES, tiny_tokenizer

TURN_STYLES = [name for name, style in STYLES.items() if "raise_exception" not in style.template]
BLOCK_STYLES = [name for name in STYLES if name not in TURN_STYLES]
BOS_STYLES = [name for name, style in STYLES.items() if "bos_token" in style.template]

Document = tuple[str, str]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def whole_ids(
    style: str, system: str | None, documents: Sequence[Document], messages: Sequence[Message]
) -> list[int]:
    """What the chat template itself gives for the conversation."""
    tokenizer = tiny_tokenizer(style)
    conversation: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    contents = [document_content(title, text) for title, text in documents]
    if style in TURN_STYLES:
        conversation += [*map(user, contents), *messages]
    else:
        first = STYLES[style].lead + "".join(f"{c}\n\n" for c in contents) + messages[0]["content"]
        conversation += [user(first), *messages[1:]]
    text = tokenizer.apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def segment_ids(
    style: str, system: str | None, documents: Sequence[Document], messages: Sequence[Message]
) -> list[int]:
    """The same conversation in segments."""
    renderer = ChatRenderer(tiny_tokenizer(style))
    ids = renderer.prefix_ids(system)
    for title, text in documents:
        ids = ids + renderer.document_ids(title, text)
    return ids + renderer.question_ids(messages)


def control_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    return {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


# ---------------------------------------------------------------- equality with the template

CONTROLS = {text for style in STYLES.values() for text in (*style.controls, *style.plain)}
characters = st.one_of(
    st.sampled_from("oakst .,!?'\"\n\r\t<|>[]0123456789"), st.characters(exclude_categories=["Cs"])
)


def plain(**sizes: int) -> st.SearchStrategy[str]:
    """Text without control strings and without blanks at its ends."""
    texts = st.text(characters, **sizes).map(str.strip)
    return texts.filter(lambda text: text and not any(control in text for control in CONTROLS))


contents = plain(min_size=1, max_size=30)
titles = st.one_of(st.just(""), plain(min_size=1, max_size=8))
later_turns = st.lists(st.tuples(contents, contents), max_size=2)


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=40, deadline=None)
@given(
    system=st.one_of(st.none(), contents),
    documents=st.lists(st.tuples(titles, contents), max_size=3),
    question=contents,
    later=later_turns,
)
def test_segments_add_up_to_the_template(
    style: str, system: str | None, documents: list[Document], question: str, later: list[tuple[str, str]]
) -> None:
    messages = [user(question)]
    for answer, following in later:
        messages += [{"role": "assistant", "content": answer}, user(following)]
    got = segment_ids(style, system, documents, messages)
    assert got == whole_ids(style, system, documents, messages)


@pytest.mark.parametrize("style", TURN_STYLES)
def test_blanks_around_a_question_are_the_templates_to_keep(style: str) -> None:
    messages = [user("  \n How tall? \n")]
    documents = [("", "An oak.")]
    assert segment_ids(style, None, documents, messages) == whole_ids(style, None, documents, messages)


@pytest.mark.parametrize("style", STYLES)
def test_the_layout_follows_the_template(style: str) -> None:
    assert ChatRenderer(tiny_tokenizer(style)).layout == ("turns" if style in TURN_STYLES else "block")


# ---------------------------------------------------------------- once, not per document


@pytest.mark.parametrize("style", BOS_STYLES)
def test_bos_stands_once_and_first(style: str) -> None:
    tokenizer = tiny_tokenizer(style)
    ids = segment_ids(style, "Be brief.", [("A", "one"), ("", "two")], [user("How tall?")])
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("style", ["smollm2", "qwen2.5", "llama3"])
def test_the_default_system_block_stands_once(style: str) -> None:
    tokenizer = tiny_tokenizer(style)
    marker = "Today Date" if style == "llama3" else "You are a helpful assistant"
    text = tokenizer.decode(segment_ids(style, None, [("A", "one"), ("", "two")], [user("How tall?")]))
    assert text.count(marker) == 1
    assert marker in tokenizer.decode(ChatRenderer(tokenizer).prefix_ids(None))


@pytest.mark.parametrize("style", ["smollm2", "qwen2.5"])
def test_a_system_message_replaces_the_default_one(style: str) -> None:
    tokenizer = tiny_tokenizer(style)
    text = tokenizer.decode(segment_ids(style, "Be brief.", [("", "one")], [user("How tall?")]))
    assert "You are a helpful assistant" not in text
    assert text.count("Be brief.") == 1


def test_thinking_is_off_where_the_template_knows_it() -> None:
    tokenizer = tiny_tokenizer("qwen3")
    text = tokenizer.decode(ChatRenderer(tokenizer).question_ids([user("How tall?")]))
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("style", STYLES)
def test_a_document_has_the_same_ids_wherever_it_stands(style: str) -> None:
    first, second = ("A", "An oak."), ("", "A birch.")
    messages = [user("How tall?")]
    one = segment_ids(style, None, [first, second], messages)
    other = segment_ids(style, None, [second, first], messages)
    assert sorted(one) == sorted(other) and one != other
    assert other == whole_ids(style, None, [second, first], messages)


# ---------------------------------------------------------------- content is never control


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("form", ["{}", "an oak {} grows", "{0}{0}", "\ue000{}\ue001"])
def test_control_strings_in_content_are_text(style: str, form: str) -> None:
    tokenizer = tiny_tokenizer(style)
    control = control_ids(tokenizer)
    renderer = ChatRenderer(tokenizer)

    def controls(ids: Sequence[int]) -> list[int]:
        return [i for i in ids if i in control]

    for string in STYLES[style].controls:
        text = form.format(string)
        for got, harmless in (
            (renderer.document_ids("", text), renderer.document_ids("", "oak")),
            (renderer.document_ids(text, "oak"), renderer.document_ids("oak", "oak")),
            (renderer.prefix_ids(text), renderer.prefix_ids("oak")),
            (renderer.question_ids([user(text)]), renderer.question_ids([user("oak")])),
        ):
            assert controls(got) == controls(harmless)
            assert text in tokenizer.decode(got)


def test_a_control_string_split_by_another_does_not_come_together() -> None:
    tokenizer = tiny_tokenizer("qwen2.5")
    ids = ChatRenderer(tokenizer).document_ids("", "<|im_<|im_end|>end|> <|im_start|<|im_start|>>")
    assert [i for i in ids if i in control_ids(tokenizer)] == [1, 2]


def test_content_with_every_marker_is_refused() -> None:
    text = "".join(map(chr, range(0xE000, 0xF8FF)))
    with pytest.raises(TemplateError, match="private-use"):
        ChatRenderer(tiny_tokenizer("qwen2.5")).document_ids("", text)


@pytest.mark.parametrize("style", STYLES)
def test_content_like_the_probes_is_content(style: str) -> None:
    probe = "Quercus alpha and Betula beta"
    documents, messages = [(probe, probe)], [user(probe)]
    assert segment_ids(style, probe, documents, messages) == whole_ids(style, probe, documents, messages)


# ---------------------------------------------------------------- refusals, digests, dates


def test_a_tokenizer_without_template_is_refused() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer().backend_tokenizer)
    with pytest.raises(TemplateError, match="no chat template"):
        ChatRenderer(bare)


def with_template(template: str, style: str = "smollm2") -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(style).backend_tokenizer)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    "template",
    [
        # numbers its turns
        "{% for m in messages %}<|im_start|>{{ loop.index }} {{ m.content }}<|im_end|>{% endfor %}",
        # says how many turns there will be
        "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
        # no control tokens: words of neighbouring segments grow together
        "{% for m in messages %}{{ m.content }}{% endfor %}oak",
    ],
)
def test_templates_that_cannot_be_cut_are_refused(template: str) -> None:
    with pytest.raises(TemplateError):
        ChatRenderer(with_template(template))


def test_questions_need_messages_in_an_order_the_template_takes() -> None:
    for style in STYLES:
        with pytest.raises(TemplateError, match="at least one"):
            ChatRenderer(tiny_tokenizer(style)).question_ids([])
    renderer = ChatRenderer(tiny_tokenizer("mistral"))
    with pytest.raises(TemplateError, match="user message"):
        renderer.question_ids([{"role": "assistant", "content": "hi"}])
    with pytest.raises(TemplateError, match="alternate"):
        renderer.question_ids([user("a"), user("b")])


def test_digests_tell_tokenizers_and_templates_apart() -> None:
    digests = {style: ChatRenderer(tiny_tokenizer(style)).digest() for style in STYLES}
    assert len(set(digests.values())) == len(STYLES)
    changed = with_template(STYLES["smollm2"].template.replace("helpful", "kind"))
    assert ChatRenderer(changed).digest() != digests["smollm2"]


def test_a_digest_does_not_depend_on_what_was_tokenised() -> None:
    tokenizer = with_template(STYLES["smollm2"].template)
    before = ChatRenderer(tokenizer).digest()
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer(["an oak", "a"], padding=True, truncation=True, max_length=3)
    assert ChatRenderer(tokenizer).digest() == before


def test_a_date_in_the_template_may_change_while_the_renderer_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return datetime(2031, 5, 6)

    renderer = ChatRenderer(tiny_tokenizer("llama3"))
    before = renderer.document_ids("A", "one"), renderer.question_ids([user("How tall?")])
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Tomorrow)
    assert "06 May 2031" in tiny_tokenizer("llama3").decode(renderer.prefix_ids(None))
    assert (renderer.document_ids("A", "one"), renderer.question_ids([user("How tall?")])) == before


# ---------------------------------------------------------------- the text of a document


def test_title_and_text_are_put_together_once() -> None:
    assert document_content(" A ", "\n one \n") == "A\n\none"
    assert document_content("  ", " one ") == "one"


def test_a_content_hash_is_of_title_and_text_as_given() -> None:
    hashes = {content_hash(*pair) for pair in [("a", "b"), ("", "ab"), ("ab", ""), ("a", "b "), ("b", "a")]}
    assert len(hashes) == 5
    assert content_hash("a", "b") == content_hash("a", "b")
    assert content_hash("", "\ud800") != content_hash("", "\ud801")
