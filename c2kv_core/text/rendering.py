"""Chat template to segments: prefix, documents, question (DESIGN 2, Text).

The template is rendered as a whole and cut, so that the concatenated segments are what the template gives for the
conversation, default system blocks included. Content is tokenised with special tokens split: ``<|im_end|>`` in a
document is text, never a control token.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Literal, TypedDict

from jinja2 import TemplateError as JinjaError
from transformers import PreTrainedTokenizerFast

from c2kv_core.errors import TemplateError
from c2kv_core.text.document_text import document_content
from c2kv_core.text.pieces import Disguise, PieceEncoder

RENDERING_VERSION = 1
"""Raised when the layout of documents changes: it is part of the fingerprint."""

# Contents of probe turns: plain words, alike in no template.
_FIRST, _SECOND = "Quercus alpha", "Betula beta"


class Message(TypedDict):
    """A message of the conversation, OpenAI form with text content."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatRenderer:
    """Renders the segments of one tokenizer's chat template.

    ``layout`` is ``turns`` where every document is a user turn of its own, ``block`` where the template forbids
    user turns in a row (Mistral): documents are then blocks of one user turn, each ended by a blank line.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Probe the template.

        Raises:
            TemplateError: there is none, or its segments do not add up to the whole.
        """
        if not tokenizer.chat_template:
            raise TemplateError("the tokenizer has no chat template; use an instruction-tuned model")
        self.tokenizer = tokenizer
        self._pieces = PieceEncoder(tokenizer)
        self.layout: Literal["turns", "block"] = "turns" if self._allows_user_turns_in_a_row() else "block"
        self._check_segments()

    # ---- segments

    def prefix_ids(self, system: str | None) -> list[int]:
        """Everything before the first document; may be empty where the template puts nothing there."""
        disguise = self._pieces.disguise([system or ""])
        return self._pieces.encode(self._prefix_text(self._system(system, disguise)), disguise)

    def document_ids(self, title: str, text: str) -> list[int]:
        """One whole document or part, with its turn."""
        content = document_content(title, text)
        disguise = self._pieces.disguise([content])
        hidden = disguise.hide(content)
        if self.layout == "block":
            return self._pieces.encode(f"{hidden}\n\n", disguise)
        return self._pieces.encode(self._after_first_turn([_user(hidden)]), disguise)

    def question_ids(self, messages: Sequence[Message]) -> list[int]:
        """All messages after the documents, and the assistant header.

        Raises:
            TemplateError: no message, or an order of roles that the template refuses.
        """
        if not messages:
            raise TemplateError("expected at least one user message, got none")
        disguise = self._pieces.disguise([m["content"] for m in messages])
        hidden = [{"role": m["role"], "content": disguise.hide(m["content"])} for m in messages]
        if self.layout == "block":
            text = self._question_in_block(hidden)
        else:
            text = self._after_first_turn(hidden, generate=True)
        return self._pieces.encode(text, disguise)

    def answer_ids(self, text: str) -> list[int]:
        """An answer as it stands after the assistant header, without the token that ends it."""
        disguise = self._pieces.disguise([text])
        return self._pieces.encode(disguise.hide(text), disguise)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Character range of each token of plain text, for splitting."""
        return self._pieces.offsets(text)

    def digest(self) -> str:
        """SHA-256 hex of tokenizer and chat template; padding and truncation state do not count."""
        settings = json.loads(self.tokenizer.backend_tokenizer.to_str())
        settings.pop("padding", None)
        settings.pop("truncation", None)
        text = json.dumps([settings, self.tokenizer.chat_template], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    # ---- how the template is cut

    def _after_first_turn(self, messages: list[dict[str, str]], *, generate: bool = False) -> str:
        # Rendered anew each time: some templates print the date.
        first = self._render([_user(_FIRST)])
        return _after(self._render([_user(_FIRST), *messages], generate=generate), first)

    @cached_property
    def _block_lead(self) -> str:
        """What a shared user turn starts with, so that no blank of the template grows into the first document."""
        before, _, _ = self._render([_user(_FIRST)]).rpartition(_FIRST)
        return "\n\n" if before.endswith(" ") else ""

    def _prefix_text(self, system: list[dict[str, str]]) -> str:
        if self.layout == "block":
            return self._render([*system, _user(self._block_lead + _FIRST)]).rpartition(_FIRST)[0]
        one = self._render([*system, _user(_FIRST)])
        second_turn = _after(self._render([*system, _user(_FIRST), _user(_SECOND)]), one)
        first_turn = second_turn.replace(_SECOND, _FIRST)
        if not one.endswith(first_turn):
            raise TemplateError(
                "the chat template renders the first user turn unlike later ones; not supported"
            )
        return one[: -len(first_turn)]

    def _question_in_block(self, messages: list[dict[str, str]]) -> str:
        first, *later = messages
        if first["role"] != "user":
            raise TemplateError("this model's template needs a user message right after the documents")
        whole = self._render([_user(_FIRST + first["content"]), *later], generate=True)
        return whole.partition(_FIRST)[2]

    def _allows_user_turns_in_a_row(self) -> bool:
        try:
            self._render([_user(_FIRST), _user(_SECOND)])
        except TemplateError:
            return False
        return True

    def _system(self, system: str | None, disguise: Disguise) -> list[dict[str, str]]:
        return [] if system is None else [{"role": "system", "content": disguise.hide(system)}]

    def _render(self, messages: list[dict[str, str]], *, generate: bool = False) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generate, enable_thinking=False
            )
        except JinjaError as error:
            raise TemplateError(f"the model's chat template refuses this conversation: {error}") from error
        return str(text)

    def _check_segments(self) -> None:
        """The segments of a probe conversation must add up to the template's own ids."""
        title, text, question = "Quercus", "An oak.\nIt is tall.", "How tall?"
        messages: list[dict[str, str]]
        if self.layout == "block":
            block = f"{document_content(title, text)}\n\n" * 2
            messages = [_user(f"{self._block_lead}{block}{question}")]
        else:
            messages = [_user(document_content(title, text))] * 2 + [_user(question)]
        whole = self._render(messages, generate=True)
        expected = self.tokenizer(whole, add_special_tokens=False)["input_ids"]
        got = self.prefix_ids(None) + self.document_ids(title, text) * 2
        got += self.question_ids([{"role": "user", "content": question}])
        if got != expected:
            raise TemplateError(
                "the segments of a probe conversation do not add up to the chat template's own ids; "
                "the template or tokenizer is not supported"
            )


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _after(whole: str, before: str) -> str:
    if not whole.startswith(before):
        raise TemplateError("the chat template changes earlier turns when later ones follow; not supported")
    return whole[len(before) :]
