"""Clients as people have them, against a real HTTP server: LangChain's ChatOpenAI, and curl."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from openai import BadRequestError, NotFoundError

from tests.serve_local import local_api, over_http
from tests.serve_support import QUESTION, Reference, World, ask_body, make_world

pytest_plugins = ["tests.serve_support"]

TOKENS = 12
DOCUMENTS: dict[str, Any] = {"documents": [{"id": "oak"}, {"id": "ash"}], "c2kv": {"on_missing": "error"}}


@pytest.fixture(scope="module")
def url(world: World) -> Iterator[str]:
    with local_api(world.config()) as api, over_http(api) as port:
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture(scope="module")
def expected(reference: Reference) -> str:
    """What plain calls answer over the same documents."""
    return reference.answer(reference.slots("oak", "ash"), tokens=TOKENS)


def chat(url: str, **changes: Any) -> ChatOpenAI:
    """As its own documentation makes it, with the documents beside."""
    settings: dict[str, Any] = {
        "model": "tiny",
        "base_url": url,
        "api_key": "none",
        "max_tokens": TOKENS,
        "temperature": 0,
        "max_retries": 0,
        "extra_body": DOCUMENTS,
    }
    return ChatOpenAI(**{**settings, **changes})


def test_langchain_invokes(url: str, expected: str) -> None:
    answer = chat(url).invoke([HumanMessage(QUESTION)])
    assert answer.content == expected
    used = answer.usage_metadata
    assert used is not None and used["output_tokens"] == TOKENS
    assert used["input_tokens"] + TOKENS == used["total_tokens"]
    assert 0 < used["input_token_details"]["cache_read"] < used["input_tokens"]
    assert answer.response_metadata["model_name"] == "tiny"
    assert answer.response_metadata["finish_reason"] == "length"
    assert "c2kv" not in f"{answer.response_metadata} {answer.additional_kwargs}"  # as docs/serving.md says


def test_langchain_streams_with_usage(url: str, expected: str) -> None:
    chunks = list(chat(url, stream_usage=True).stream(QUESTION))
    assert "".join(str(chunk.content) for chunk in chunks) == expected and len(chunks) > 3
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert whole.usage_metadata == chat(url).invoke(QUESTION).usage_metadata
    assert whole.response_metadata["finish_reason"] == "length"


def test_langchain_is_asynchronous(url: str, expected: str) -> None:
    async def both() -> tuple[str, list[str], list[str]]:
        model = chat(url)
        whole = await model.ainvoke(QUESTION)
        pieces = [str(chunk.content) async for chunk in model.astream(QUESTION)]
        many = await model.abatch([QUESTION, "Which bark is white?"])
        return str(whole.content), pieces, [str(one.content) for one in many]

    whole, pieces, many = asyncio.run(both())
    assert whole == "".join(pieces) == many[0] == expected and len(many) == 2


def test_langchain_chains_conversations_and_documents_by_call(url: str, expected: str) -> None:
    prompt = ChatPromptTemplate.from_messages([("human", "{question}")])
    model = chat(url, extra_body=None)
    assert (prompt | model.bind(extra_body=DOCUMENTS)).invoke({"question": QUESTION}).content == expected
    turns = [SystemMessage("Be brief."), HumanMessage("Hello"), AIMessage("Yes?"), HumanMessage(QUESTION)]
    answer = model.bind(logprobs=True, top_logprobs=2, stop=["\x00"]).invoke(turns)
    assert len(answer.response_metadata["logprobs"]["content"]) == TOKENS
    parts = model.invoke([HumanMessage([{"type": "text", "text": QUESTION}])])
    assert parts.content == model.invoke(QUESTION).content


def test_langchain_raises_the_openai_clients_errors(url: str) -> None:
    with pytest.raises(NotFoundError, match="elm"):
        chat(url, extra_body={"documents": [{"id": "elm"}]}).invoke(QUESTION)
    with pytest.raises(NotFoundError, match="elm"):
        list(chat(url, extra_body={"documents": [{"id": "elm"}]}).stream(QUESTION))
    tool = {"name": "look", "description": "x", "parameters": {"type": "object", "properties": {}}}
    with pytest.raises(BadRequestError, match="tools is not supported"):
        chat(url).bind_tools([tool]).invoke(QUESTION)


@pytest.mark.skipif(shutil.which("curl") is None, reason="expected the program curl; install it")
def test_curl_shows_a_stream_as_it_comes(url: str, expected: str) -> None:
    body = ask_body(**DOCUMENTS, max_tokens=TOKENS, stream=True)
    command = ["curl", "-sN", f"{url}/chat/completions", "-H", "Content-Type: application/json"]
    ran = subprocess.run([*command, "-d", json.dumps(body)], capture_output=True, timeout=60, check=True)
    *events, end = ran.stdout.decode().split("\n\n")
    assert end == "" and events.pop() == "data: [DONE]"
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == expected


@pytest.mark.skipif(shutil.which("curl") is None, reason="expected the program curl; install it")
def test_the_documentations_commands_do_what_it_says(tmp_path: Path) -> None:
    doc = (Path(__file__).parent.parent / "docs/serving.md").read_text()
    (commands,) = re.findall(r"```bash\n(curl -X PUT.*?)```", doc, re.DOTALL)
    put, ask = commands.split("\ncurl")
    with local_api(make_world(tmp_path).config()) as api, over_http(api) as port:
        answers = []
        for command in (put, f"curl{ask}"):
            asked = command.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace("curl", "curl -s")
            ran = subprocess.run(["bash", "-c", asked], capture_output=True, timeout=60, check=True)
            answers.append(json.loads(ran.stdout))
    assert answers[0]["id"] == "elm"
    assert [d["tier"] for d in answers[1]["c2kv"]["documents"]] == ["memory", "skipped"]
