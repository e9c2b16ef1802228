"""Requests: what is accepted, what is refused and how the refusal reads."""

import json
from typing import Any

import pytest

from serve_app.conversation import lay_out
from serve_app.errors import ApiError, Fault
from serve_app.protocol import ChatRequest
from serve_app.request_body import parse_request
from tests.serve_support import ask_body


def parse(**fields: Any) -> ChatRequest:
    return parse_request(json.dumps(ask_body(**fields)).encode())


def refusal(body: bytes) -> Fault:
    with pytest.raises(ApiError) as caught:
        parse_request(body)
    assert caught.value.fault.status == 400
    return caught.value.fault


def refused(**fields: Any) -> Fault:
    return refusal(json.dumps(ask_body(**fields)).encode())


def test_plain_request_has_openais_defaults() -> None:
    request = parse()
    assert request.documents == [] and request.c2kv.on_missing == "extract"
    assert request.token_limit is None and not request.stream and request.stop is None


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "someone", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"n": 1, "logprobs": False, "frequency_penalty": 0, "presence_penalty": 0.0, "tools": []},
        {"logit_bias": None, "response_format": {"type": "text"}, "parallel_tool_calls": True},
        {"brand_new_openai_field": {"x": 1}},
    ],
)
def test_fields_that_change_nothing_are_accepted(fields: dict[str, Any]) -> None:
    parse(**fields)


@pytest.mark.parametrize("field", sorted(set(ChatRequest.model_fields) - {"messages"}))
def test_null_is_as_good_as_absent(field: str) -> None:
    assert parse(**{field: None}) == parse_request(
        json.dumps({name: value for name, value in ask_body().items() if name != field}).encode()
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("presence_penalty", 0.5),
        ("logit_bias", {"5": 10}),
        ("modalities", ["text", "audio"]),
    ],
)
def test_fields_that_would_change_the_answer_are_refused_by_name(field: str, value: object) -> None:
    fault = refused(**{field: value})
    assert (fault.code, fault.param) == ("unsupported_parameter", field)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [""]}, "stop.0"),
        ({"seed": "x"}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"documents": [{}]}, "documents.0"),
        ({"documents": [{"id": "a", "text": "b"}]}, "documents.0"),
        ({"documents": [{"id": "a", "title": "b"}]}, "documents.0"),
        ({"documents": [{"title": "b"}]}, "documents.0"),
        ({"documents": [{"id": ""}]}, "documents.0.id"),
        ({"c2kv": {"on_missing": "guess"}}, "c2kv.on_missing"),
        ({"c2kv": {"deadline_ms": 0}}, "c2kv.deadline_ms"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, None),
    ],
)
def test_bad_values_are_refused_where_they_are(fields: dict[str, Any], param: str | None) -> None:
    fault = refused(**fields)
    assert (fault.code, fault.param) == ("invalid_request", param)
    assert "\n" not in fault.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"documents": [5]}, "documents.0: expected an object with `id` or `text`, got 5"),
        ({"documents": [["a"]]}, "documents.0: expected an object with `id` or `text`"),
        ({"messages": ["a"]}, "messages.0: expected an object, got 'a'"),
    ],
)
def test_what_is_no_object_is_told_what_to_be(fields: dict[str, Any], message: str) -> None:
    assert refused(**fields).message == message


@pytest.mark.parametrize(
    ("fields", "wrong", "near"),
    [
        ({"c2kv": {"on_mising": "skip"}}, "on_mising", "on_missing"),
        ({"c2kv": {"deadline": 5}}, "deadline", "deadline_ms"),
        ({"documents": [{"text": "x", "titel": "y"}]}, "titel", "title"),
        ({"document": []}, "document", "documents"),
        ({"c2vk": {}}, "c2vk", "c2kv"),
    ],
)
def test_typos_are_refused_with_the_nearest_key(fields: dict[str, Any], wrong: str, near: str) -> None:
    fault = refused(**fields)
    assert fault.code == "unknown_parameter"
    assert repr(wrong) in fault.message and repr(near) in fault.message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff"])
def test_bodies_that_are_no_json_object_are_refused(body: bytes) -> None:
    assert refusal(body).code == "invalid_json"


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": "x\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x\xed\xa0\x80"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "documents": [{"text": "x\\udfff"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "documentz\\ud800": 1}',
    ],
)
def test_half_a_surrogate_pair_is_refused_wherever_it_is(body: bytes) -> None:
    fault = refusal(body)
    assert fault.code == "invalid_json" and "surrogate" in fault.message
    json.dumps(fault.body, ensure_ascii=False).encode()


@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"])
def test_deep_nesting_is_the_clients_fault(body: bytes) -> None:
    assert refusal(body).code == "invalid_json"


def test_missing_messages_are_named() -> None:
    assert refusal(b'{"model": "tiny"}').param == "messages"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "tall?"}]
    assert parse(messages=[{"role": "user", "content": parts}]).messages[0].content == "How tall?"


def test_newer_and_older_limit_mean_the_same() -> None:
    assert parse(max_tokens=3).token_limit == parse(max_completion_tokens=3).token_limit == 3


def test_system_message_goes_before_the_documents_and_the_rest_behind() -> None:
    turns = [("developer", "Be brief."), ("user", "a"), ("assistant", "b"), ("system", "c"), ("user", "d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    conversation = lay_out(parse(messages=messages).messages)
    assert conversation.system == "Be brief."
    assert [m["content"] for m in conversation.after_documents] == ["a", "b", "c", "d"]


def test_a_system_message_alone_is_no_conversation() -> None:
    with pytest.raises(ApiError, match="user message"):
        lay_out(parse(messages=[{"role": "system", "content": "Be brief."}]).messages)
