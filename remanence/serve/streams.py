"""Responses that end when the client leaves, and streams of events (SSE)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from remanence.serve.errors import INTERNAL, api_error

T = TypeVar("T")


class ClientLeftError(Exception):
    """The client has closed the connection before the response was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, and cancel it if the client leaves. Raises `ClientLeftError` then."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeftError
    finally:
        for each in (task, left):
            if not each.done():
                each.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await each


async def _left(receive: Receive) -> None:
    """Wait until the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: Mapping[str, Any], name: str | None = None) -> str:
    """One event of a stream."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n"


class EventStream(Response):
    """A stream of events. An error in the middle of it is its last event."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str], headers: Mapping[str, str] | None = None) -> None:
        self.events, self.status_code, self.background = events, 200, None
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientLeftError, OSError):
                await while_connected(receive, self._send(send))
        finally:
            await self.events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        failed: Exception | None = None
        try:
            async for text in self.events:
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        except Exception as error:
            known = api_error(error)
            failed = error if known is None else None
            text = event((known or INTERNAL).body(), "error")
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        if failed is not None:
            raise failed
