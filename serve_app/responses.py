"""An answer's events as an HTTP response, whole or streamed."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from fastapi.responses import JSONResponse, Response, StreamingResponse

from serve_app.access_log import Access
from serve_app.answers import Usage
from serve_app.completion import STREAM_END, CompletionForm, error_chunk
from serve_app.errors import INTERNAL, ApiError, Fault
from serve_app.events import ReplicaEvent, fault_in
from serve_app.keys import Grant
from serve_app.quotas import Quotas
from serve_app.text_completion import TextForm

Events = AsyncGenerator[ReplicaEvent, None]
Form = CompletionForm | TextForm


@dataclass(frozen=True, kw_only=True)
class Account:
    """Where an answer is entered: the log, and what its key may use."""

    access: Access
    grant: Grant
    quotas: Quotas

    def text_came(self) -> None:
        """Enter a piece of the answer."""
        self.access.text_came()

    def finished(self, usage: Usage) -> None:
        """Enter a finished answer."""
        self.access.usage = usage
        self.quotas.used(self.grant, usage["total_tokens"])

    def broken(self, fault: Fault) -> bytes:
        """Enter an answer that failed in its middle; what its client is told."""
        self.access.code = fault.code
        return error_chunk(fault)


async def whole(form: Form, events: Events, account: Account) -> Response:
    """The answer in one piece."""
    text, logprobs = "", []
    async with aclosing(events):
        async for event in events:
            match event["event"]:
                case "text":
                    account.text_came()
                    text += event["text"]
                    logprobs += event["logprobs"]
                case "error":
                    raise ApiError(fault_in(event))
                case "end":
                    account.finished(event["usage"])
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
                match event["event"]:
                    case "text":
                        account.text_came()
                        yield form.text_chunk(event["text"], event["logprobs"])
                    case "error":
                        yield account.broken(fault_in(event))
                        return
                    case "end":
                        account.finished(event["usage"])
                        for chunk in form.last_chunks(event):
                            yield chunk
                        yield STREAM_END
                        return
        except ApiError as error:
            yield account.broken(error.fault)
