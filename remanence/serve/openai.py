"""The routes of OpenAI's API: chat completions, completions, responses and models."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request
from starlette.responses import JSONResponse, Response

from remanence.serve import schemas
from remanence.serve.errors import ApiError
from remanence.serve.schemas import ChatRequest, CompletionRequest, ModelInfo, ModelList, ResponseRequest
from remanence.serve.service import Answered, Service, Started, Turn
from remanence.serve.streams import EventStream, event, while_connected

Events = AsyncGenerator[Started | str | Answered]
SessionId = Annotated[
    schemas.Name | None,
    Header(description="The name or identifier of the memory, instead of the field `user`."),
]
Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=256,
        description="A name of the request. If it is sent again, it gets the same answer, and is not read again.",
    ),
]
REPEATED = "Idempotent-Replayed"
"""The header of a response to a request that was answered before."""
SENT = {"type": "object", "properties": {name: {"type": "string"} for name in ("event", "data")}}
"""The schema of an event of a stream; `data` is JSON."""
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {**SENT, "required": ["data"]}}}}
}
"""That an answer can be a stream, for the schema."""
DONE = "data: [DONE]\n\n"
"""The end of a stream of completions."""


def request_owner(request: Request) -> str:
    """The owner that sent a request."""
    return request.state.owner


Owner = Annotated[str, Depends(request_owner)]


def response_id(version: str) -> str:
    """The identifier of the response that made a version."""
    return "resp_" + version.removeprefix("ver_")


def version_id(response: str) -> str:
    """The identifier of the version that a response made."""
    return "ver_" + response.removeprefix("resp_")


def named_memory(user: str | None, header: str | None) -> str | None:
    """The memory that a request names."""
    if user is not None and header is not None and user != header:
        raise ApiError(
            400, "invalid_value", "user: expected the same name as in the header X-Session-Id, got another"
        )
    return header if user is None else user


def usage(answered: Answered) -> dict[str, Any]:
    """The number of tokens of a completion. Only what was read for the request counts: not what its memory has read."""
    return {
        "prompt_tokens": answered.tokens_read,
        "completion_tokens": answered.tokens_generated,
        "total_tokens": answered.tokens_read + answered.tokens_generated,
    }


async def complete(events: Events) -> tuple[Started, Answered]:
    """The first and the last event of an answer."""
    started = answered = None
    async for each in events:
        if isinstance(each, Started):
            started = each
        elif isinstance(each, Answered):
            answered = each
    assert started is not None and answered is not None
    return started, answered


async def respond(
    request: Request,
    events: Events,
    *,
    whole: Callable[[Started, Answered], Mapping[str, Any]] | None,
    stream: Callable[[Started, Events], AsyncGenerator[str]],
    is_kept: bool,
) -> Response:
    """The response with an answer: a stream of events, or, with `whole`, one object. Errors before the first token are
    raised, so that they have a status code.
    """

    def own(started: Started) -> dict[str, str]:
        repeated = {REPEATED: "true"} if started.is_repeated else {}
        return {"X-Memory-Version": started.version, **repeated} if is_kept else {}

    async def begin() -> Response:
        if whole is not None:
            try:
                started, answered = await complete(events)
            finally:
                await events.aclose()
            return JSONResponse(dict(whole(started, answered)), headers=own(started))
        first = await anext(events)
        assert isinstance(first, Started)
        return EventStream(stream(first, events), own(first))

    return await while_connected(request.receive, begin())


def router(service: Service, model: str) -> APIRouter:
    """The routes. `model` is the name of the served model."""
    routes = APIRouter(prefix="/v1", tags=["OpenAI"])
    info = ModelInfo(id=model, created=int(time.time()), owned_by="remanence")

    def check_model(name: str) -> None:
        if name != model:
            raise ApiError(404, "model_not_found", f"model: expected {model!r}, got another")

    @routes.get("/models", summary="List the served model")
    async def models(owner: Owner) -> ModelList:
        return ModelList(data=[info])

    @routes.get("/models/{name:path}", summary="Describe the served model")
    async def show_model(name: str, owner: Owner) -> ModelInfo:
        check_model(name)
        return info

    @routes.post("/chat/completions", summary="Answer a conversation", responses=STREAMED)
    async def chat(
        request: Request, body: ChatRequest, owner: Owner, x_session_id: SessionId = None, key: Key = None
    ) -> Response:
        check_model(body.model)
        memory = named_memory(body.user, x_session_id)
        turn = Turn(
            owner=owner,
            memory=memory,
            messages=[each.plain() for each in body.messages],
            sampling=body.fields(body.max_completion_tokens or body.max_tokens, body.stop),
            key=key,
        )
        choice = lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}}
        delta = lambda text: {"delta": {"content": text}}
        form = Form("chatcmpl-", "chat.completion", "chat.completion.chunk", choice, delta)
        return await answer(request, turn, body, form)

    @routes.post("/completions", summary="Continue a text", responses=STREAMED)
    async def completions(
        request: Request,
        body: CompletionRequest,
        owner: Owner,
        x_session_id: SessionId = None,
        key: Key = None,
    ) -> Response:
        check_model(body.model)
        text = body.prompt if isinstance(body.prompt, str) else body.prompt[0]
        memory = named_memory(body.user, x_session_id)
        sampling = body.fields(body.max_tokens, body.stop)
        turn = Turn(owner=owner, memory=memory, text=text, sampling=sampling, key=key)
        choice = lambda text: {"text": text}
        form = Form("cmpl-", "text_completion", "text_completion", choice, choice)
        return await answer(request, turn, body, form)

    async def answer(
        request: Request, turn: Turn, body: ChatRequest | CompletionRequest, form: Form
    ) -> Response:
        options = body.stream_options
        with_usage = options is not None and options.include_usage
        return await respond(
            request,
            service.answer(turn),
            whole=None if body.stream else partial(form.whole, model),
            stream=partial(form.stream, model, with_usage=with_usage),
            is_kept=turn.memory is not None,
        )

    @routes.post("/responses", summary="Answer, from the response before", responses=STREAMED)
    async def responses(
        request: Request, body: ResponseRequest, owner: Owner, x_session_id: SessionId = None, key: Key = None
    ) -> Response:
        check_model(body.model)
        memory, version = named_memory(body.user, x_session_id), None
        if body.previous_response_id is not None:
            version = version_id(body.previous_response_id)
            found = service.memories.find_version(owner, version)
            if memory is not None and service.memories.find(owner, memory).id != found.memory:
                raise ApiError(
                    400, "invalid_value", "previous_response_id: expected one of the memory, got another"
                )
            memory = None
        turn = Turn(
            owner=owner,
            memory=memory,
            version=version,
            messages=body.messages(),
            sampling=body.fields(body.max_output_tokens),
            is_kept=body.store is not False,
            key=key,
        )
        kept = turn.is_kept or memory is not None or version is not None
        return await respond(
            request,
            service.answer(turn),
            whole=None if body.stream else partial(response, body, model),
            stream=partial(response_stream, body, model),
            is_kept=kept,
        )

    return routes


class Form:
    """The form of a completion.

    Args:
        prefix: the beginning of its identifier.
        name, part: the types of the object, and of a part of it in a stream.
        choice, delta: functions of a text: the fields of the choice with it, whole and in a part.
    """

    def __init__(
        self,
        prefix: str,
        name: str,
        part: str,
        choice: Callable[[str], dict[str, Any]],
        delta: Callable[[str], dict[str, Any]],
    ) -> None:
        self.prefix, self.name, self.part, self.choice, self.delta = prefix, name, part, choice, delta

    def _head(self, name: str, model: str, started: Started) -> dict[str, Any]:
        identifier = self.prefix + started.version.removeprefix("ver_")
        return {"id": identifier, "object": name, "created": int(time.time()), "model": model}

    def whole(self, model: str, started: Started, answered: Answered) -> dict[str, Any]:
        """The object with a whole answer."""
        choice = {"index": 0, **self.choice(answered.text), "logprobs": None}
        return {
            **self._head(self.name, model, started),
            "choices": [{**choice, "finish_reason": answered.finish_reason}],
            "usage": usage(answered),
        }

    async def stream(
        self, model: str, started: Started, events: Events, with_usage: bool
    ) -> AsyncGenerator[str]:
        """The events of an answer."""
        head = self._head(self.part, model, started)
        none = {"usage": None} if with_usage else {}

        def part(fields: dict[str, Any], reason: str | None = None) -> str:
            choice = {"index": 0, **fields, "logprobs": None, "finish_reason": reason}
            return event({**head, "choices": [choice], **none})

        try:
            if self.part != self.name:  # a conversation
                yield part({"delta": {"role": "assistant", "content": ""}})
            async for each in events:
                if isinstance(each, str):
                    yield part(self.delta(each))
                elif isinstance(each, Answered):
                    last = {"delta": {}} if self.part != self.name else self.delta("")
                    yield part(last, each.finish_reason)
                    if with_usage:
                        yield event({**head, "choices": [], "usage": usage(each)})
            yield DONE
        finally:
            await events.aclose()


def response(
    body: ResponseRequest,
    model: str,
    started: Started,
    answered: Answered | None,
    status: str = "completed",
) -> dict[str, Any]:
    """A response object; `answered` is None while the answer is under way."""
    output, tokens = [], None
    is_cut = answered is not None and answered.finish_reason == "length"
    if answered is not None:
        status = "incomplete" if is_cut else "completed"
        output = [message_item(started, status, answered.text)]
        tokens = {
            "input_tokens": answered.tokens_read,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answered.tokens_generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answered.tokens_read + answered.tokens_generated,
        }
    return {
        "id": response_id(started.version),
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": {},
        "model": model,
        "output": output,
        "parallel_tool_calls": False,
        "previous_response_id": body.previous_response_id,
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "none",
        "tools": [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": tokens,
        "user": body.user,
    }


def message_item(started: Started, status: str, text: str | None) -> dict[str, Any]:
    """The message of a response; without text, before its first part."""
    content = [] if text is None else [text_part(text)]
    identifier = "msg_" + started.version.removeprefix("ver_")
    return {
        "type": "message",
        "id": identifier,
        "status": status,
        "role": "assistant",
        "content": content,
    }


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def response_stream(
    body: ResponseRequest, model: str, started: Started, events: Events
) -> AsyncGenerator[str]:
    """The events of a response."""
    count, text = 0, ""
    item = message_item(started, "in_progress", None)
    place = {"item_id": item["id"], "output_index": 0, "content_index": 0}

    def numbered(kind: str, **fields: Any) -> str:
        nonlocal count
        count += 1
        return event({"type": kind, "sequence_number": count - 1, **fields}, kind)

    try:
        begun = response(body, model, started, None, "in_progress")
        yield numbered("response.created", response=begun)
        yield numbered("response.in_progress", response=begun)
        yield numbered("response.output_item.added", output_index=0, item=item)
        yield numbered("response.content_part.added", **place, part=text_part(""))
        async for each in events:
            if isinstance(each, str):
                text += each
                yield numbered("response.output_text.delta", **place, delta=each, logprobs=[])
            elif isinstance(each, Answered):
                last = response(body, model, started, each)
                (item,) = last["output"]
                yield numbered("response.output_text.done", **place, text=text, logprobs=[])
                yield numbered("response.content_part.done", **place, part=text_part(text))
                yield numbered("response.output_item.done", output_index=0, item=item)
                yield numbered(f"response.{last['status']}", response=last)
    finally:
        await events.aclose()
