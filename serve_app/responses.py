"""An answer's events as an HTTP response, whole or streamed."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from fastapi.responses import JSONResponse, Response, StreamingResponse

from serve_app.access_log import Access
from serve_app.completion import STREAM_END, CompletionForm, error_chunk
from serve_app.errors import INTERNAL, ApiError, Fault
from serve_app.events import ReplicaEvent, fault_in
from serve_app.keys import Grant
from serve_app.quotas import Quotas
from serve_app.text_completion import TextForm

Events = AsyncGenerator[ReplicaEvent, None]
Form = CompletionForm | TextForm


@dataclass(kw_only=True)
class Account:
    """Where an answer is entered: the log, and what its key may use."""

    access: Access
    grant: Grant
    quotas: Quotas
    _prompt_tokens: int = 0
    _counted_tokens: int = 0

    def told(self, event: ReplicaEvent) -> None:
        """Enter what has become of the answer by now; so one that is given up half way costs what it took."""
        match event["event"]:
            case "start":
                self._prompt_tokens = event["prompt_tokens"]
                self._count(self._prompt_tokens)
            case "text":
                self.access.text_came()
                self._count(self._prompt_tokens + event["completion_tokens"])
            case "end":
                self.access.usage = event["usage"]
                self._count(event["usage"]["total_tokens"])

    def _count(self, tokens: int) -> None:
        self.quotas.used(self.grant, tokens - self._counted_tokens)
        self._counted_tokens = tokens

    def broken(self, fault: Fault) -> bytes:
        """Enter an answer that failed in its middle; what its client is told."""
        self.access.code = fault.code
        return error_chunk(fault)


async def whole(form: Form, events: Events, account: Account) -> Response:
    """The answer in one piece."""
    text, logprobs = "", []
    async with aclosing(events):
        async for event in events:
            account.told(event)
            match event["event"]:
                case "text":
                    text += event["text"]
                    logprobs += event["logprobs"]
                case "error":
                    raise ApiError(fault_in(event))
                case "end":
                    return JSONResponse(form.whole(text, logprobs, event))
    raise ApiError(INTERNAL)


async def streamed(form: Form, events: Events, account: Account) -> Response:
    """The answer as server-sent events."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(aclosing(events))
        # Headers wait for the first event: until then a refusal is still a status of its own.
        first = await anext(events, None)
        if first is None:
            raise ApiError(INTERNAL)
        if first["event"] == "error":
            raise ApiError(fault_in(first))
        account.told(first)
        stack.pop_all()
    return StreamingResponse(
        _chunks(form, events, account), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


async def _chunks(form: Form, events: Events, account: Account) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        if opening := form.first_chunk():
            yield opening
        try:
            async for event in events:
                account.told(event)
                match event["event"]:
                    case "text":
                        yield form.text_chunk(event["text"], event["logprobs"])
                    case "error":
                        yield account.broken(fault_in(event))
                        return
                    case "end":
                        for chunk in form.last_chunks(event):
                            yield chunk
                        yield STREAM_END
                        return
        except ApiError as error:
            yield account.broken(error.fault)
