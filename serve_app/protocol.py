"""The request: OpenAI's chat completion with ``documents`` and ``c2kv``."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

OnMissing = Literal["extract", "text", "skip", "error"]

MAX_STOP_STRINGS = 4
_MOST_KEYS = 100
"""Of an object of this project: each unknown one is a finding of its own, and a body has room for a million."""


class _Strict(BaseModel):
    """Keys of this project: a typo is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, body: object) -> object:
        if isinstance(body, dict) and len(body) > _MOST_KEYS:
            raise ValueError(f"expected at most {_MOST_KEYS} keys, got {len(body)}")
        return body


class _Lenient(BaseModel):
    """Keys of OpenAI's: clients send many that change nothing here."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, use_attribute_docstrings=True)


_EITHER: dict[str, Any] = {
    "oneOf": [
        {
            "required": ["id"],
            "properties": {"id": {"type": "string"}, "title": {"maxLength": 0}, "text": {"type": "null"}},
        },
        {"required": ["text"], "properties": {"id": {"type": "null"}, "text": {"type": "string"}}},
    ]
}
"""JSON schema of what ``DocumentRef`` checks."""


class DocumentRef(_Strict):
    """A document by id, or given in full."""

    model_config = ConfigDict(json_schema_extra=_EITHER)

    id: str | None = Field(default=None, min_length=1)
    """Id of a stored document."""
    title: str = ""
    """Title of a document given in full."""
    text: str | None = None
    """Text of a document given in full."""

    @model_validator(mode="after")
    def _one_form(self) -> "DocumentRef":
        if (self.id is None) == (self.text is None):
            came = "neither" if self.id is None else "both"
            raise ValueError(f"expected either id (stored) or text (given in full), got {came}")
        if self.id is not None and self.title:
            raise ValueError("expected a title only beside text; a stored document has its own")
        return self


class DocumentBody(_Strict):
    """Body of ``PUT /v1/documents/{id}``."""

    title: str = ""
    """Stands before the text."""
    text: str = Field(min_length=1)
    """What is compressed and kept."""


class C2KVOptions(_Strict):
    """How documents are found."""

    ratio: int | None = Field(default=None, ge=1)
    """Source tokens per slot; must be the one served."""
    on_missing: OnMissing = "extract"
    """What to do with a stored document whose slots cannot be had.

    ``extract`` compresses its stored text now; ``text`` places that text as ordinary tokens, and so documents given
    in full; ``skip`` leaves it out and says so; ``error`` refuses the request.
    """
    deadline_ms: int | None = Field(default=None, ge=1)
    """Milliseconds after which the request ends with 504."""


def _joined_text(content: object) -> object:
    """The text of content parts; anything that is not text is left for the validator to refuse."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            'expected text or parts {"type": "text", "text": ...}; other kinds are not supported'
        )
    return "".join(str(text) for text in texts)


class TextPart(_Lenient):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(_Lenient):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    """``developer`` counts as ``system``."""
    content: Annotated[str, BeforeValidator(_joined_text, json_schema_input_type=str | list[TextPart])]
    """Text, or a list of text parts, which are joined."""


class StreamOptions(_Lenient):
    """Options of a streamed answer."""

    include_usage: bool = False
    """Send a last chunk with usage and without choices."""


def _stop_list(stop: object) -> object:
    return [stop] if isinstance(stop, str) else stop


_StopString = Annotated[str, Field(min_length=1)]
_StopList = Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS)]


def _tell_nullable(schema: dict[str, Any]) -> None:
    """Say in the JSON schema that null is as good as absent."""
    for name, field in schema["properties"].items():
        if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
            told = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **told}


class GenerationRequest(_Lenient):
    """What both kinds of request have."""

    model_config = ConfigDict(json_schema_extra=_tell_nullable)

    model: str | None = None
    """Id of the served model; anything else is refused."""
    # The first wrong element tells enough: a body can hold a million of them.
    documents: list[DocumentRef] = Field(default=[], fail_fast=True)
    """Placed after the system message, in this order."""
    c2kv: C2KVOptions = C2KVOptions()
    temperature: float | None = Field(default=None, ge=0, le=2)
    """0 is greedy."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Probability mass of the nucleus."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Equal seeds draw equal answers to equal requests."""
    stop: Annotated[
        _StopList | None, BeforeValidator(_stop_list, json_schema_input_type=_StopString | _StopList | None)
    ] = None
    """The answer ends before the first of these."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most answer tokens."""
    ignore_eos: bool = False
    """Go on after the token that ends an answer, up to the limit; for measuring (vLLM's name)."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    """Answers to a request: only one."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, body: object) -> object:
        # OpenAI documents most fields as nullable, and clients send them so.
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}

    @property
    def token_limit(self) -> int | None:
        """Most answer tokens the client asked for."""
        return self.max_tokens

    @property
    def likeliest_tokens(self) -> int | None:
        """How many likeliest tokens to tell beside each; None tells no logprobs."""
        return None

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Most answer tokens; the newer name of ``max_tokens``."""
    logprobs: bool = False
    """Tell how likely each token was."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    """Likeliest tokens to tell beside each; needs ``logprobs``."""

    @model_validator(mode="after")
    def _consistent(self) -> "ChatRequest":
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if self.top_logprobs and not self.logprobs:
            raise ValueError("expected logprobs true beside top_logprobs; set it, or leave both out")
        if len(limits) > 1:
            raise ValueError(
                f"expected max_tokens and max_completion_tokens to agree, got {self.max_tokens} and "
                f"{self.max_completion_tokens}; give one"
            )
        return self

    @property
    def token_limit(self) -> int | None:
        """Most answer tokens the client asked for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def likeliest_tokens(self) -> int | None:
        """See ``GenerationRequest``."""
        return (self.top_logprobs or 0) if self.logprobs else None


_Prompt = Annotated[str, Field(min_length=1)]
_OnePrompt = Annotated[list[_Prompt], Field(min_length=1, max_length=1)]


def _one_prompt(prompt: object) -> object:
    if isinstance(prompt, list):
        if len(prompt) != 1 or not isinstance(prompt[0], str):
            raise ValueError("expected a text, or a list of one; send several prompts as several requests")
        return prompt[0]
    return prompt


def _no_echo(echo: bool) -> bool:
    # Not ``Literal[False]``, which 0 equals.
    if echo:
        raise ValueError("expected false; this server does not give the prompt back")
    return echo


class TextRequest(GenerationRequest):
    """Body of ``POST /v1/completions``: a prompt that goes on, without the chat template.

    Documents are placed as in a chat, after the default system message, and the prompt follows them as it is.
    """

    prompt: Annotated[_Prompt, BeforeValidator(_one_prompt, json_schema_input_type=_Prompt | _OnePrompt)]
    """Text, or a list of one text."""
    logprobs: int | None = Field(default=None, ge=0, le=5)
    """Likeliest tokens to tell beside each drawn one; null tells none."""
    echo: Annotated[
        bool, AfterValidator(_no_echo), WithJsonSchema({"type": "boolean", "const": False, "default": False})
    ] = False
    """The prompt is not given back."""
    best_of: Literal[1] | None = None

    @property
    def likeliest_tokens(self) -> int | None:
        """See ``GenerationRequest``."""
        return self.logprobs


AnyRequest = ChatRequest | TextRequest
