"""An answer's events as an HTTP response, whole or streamed."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing

from fastapi.responses import JSONResponse, Response, StreamingResponse

from serve_app.completion import STREAM_END, CompletionForm, error_chunk
from serve_app.errors import INTERNAL, ApiError
from serve_app.events import ReplicaEvent, fault_in
from serve_app.text_completion import TextForm

Events = AsyncGenerator[ReplicaEvent, None]
Form = CompletionForm | TextForm
Used = Callable[[int], None]
"""Is told how many tokens a finished answer took, the prompt included."""


async def whole(form: Form, events: Events, used: Used) -> Response:
    """The answer in one piece."""
    text, logprobs = "", []
    async with aclosing(events):
        async for event in events:
            match event["event"]:
                case "text":
                    text += event["text"]
                    logprobs += event["logprobs"]
                case "error":
                    raise ApiError(fault_in(event))
                case "end":
                    used(event["usage"]["total_tokens"])
                    return JSONResponse(form.whole(text, logprobs, event))
    raise ApiError(INTERNAL)


async def streamed(form: Form, events: Events, used: Used) -> Response:
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
        _chunks(form, events, used), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


async def _chunks(form: Form, events: Events, used: Used) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        if opening := form.first_chunk():
            yield opening
        try:
            async for event in events:
                match event["event"]:
                    case "text":
                        yield form.text_chunk(event["text"], event["logprobs"])
                    case "error":
                        yield error_chunk(fault_in(event))
                        return
                    case "end":
                        used(event["usage"]["total_tokens"])
                        for chunk in form.last_chunks(event):
                            yield chunk
                        yield STREAM_END
                        return
        except ApiError as error:
            yield error_chunk(error.fault)
