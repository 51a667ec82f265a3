"""What happens to every request before and after it is handled: checks, limits, metrics and the log."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from remanence.serve.access import Access
from remanence.serve.errors import INTERNAL, ApiError
from remanence.serve.metrics import Metrics

if TYPE_CHECKING:
    from starlette.responses import Response

LOG = logging.getLogger("remanence.serve")
"""The log: one line of JSON for each request, without any of its content."""
BODY_SECONDS = 60.0
"""The time in which the body of a request must arrive."""
UPLOAD = "/content"
"""The end of the paths of uploads, which are written to a file while they arrive."""


class Gate:
    """Wraps the application: ``app = Gate(app, access, metrics, hosts=...)``.

    Args:
        app: handles requests.
        access: whose requests they are.
        metrics: counts them.
        hosts: the names under which the server may be addressed, without ports; None: any. For a server on the local
            machine, this keeps pages of other sites from reaching it under a name of theirs.
    """

    def __init__(
        self, app: ASGIApp, access: Access, metrics: Metrics, *, hosts: Collection[str] | None = None
    ) -> None:
        self.app, self.access, self.metrics, self.hosts = app, access, metrics, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status = time.monotonic(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._handle(scope, receive, watched)
        except ApiError as error:
            await error_response(error)(scope, receive, watched)
        except Exception as error:
            if not status:
                await error_response(INTERNAL)(scope, receive, watched)
            LOG.error("%s", json.dumps({"error": type(error).__name__, "where": _where(error)}))
        finally:
            self._count(scope, status or 499, time.monotonic() - begun)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if self.hosts is not None and _host(headers.get("host", "")) not in self.hosts:
            raise ApiError(421, "wrong_host", f"host: expected one of {', '.join(self.hosts)}, got another")
        if scope["path"].startswith("/v1/"):
            owner = await asyncio.to_thread(self.access.owner, headers.get("authorization"))
            scope.setdefault("state", {})["owner"] = owner
        if scope["method"] in ("POST", "PUT", "PATCH", "DELETE"):
            limits, is_upload = self.access.limits, scope["path"].endswith(UPLOAD)
            most = limits.max_upload if is_upload else limits.max_body
            length = headers.get("content-length", "0")
            if length.isdecimal() and int(length) > most:
                raise too_large(most)
            if not is_upload:
                receive = await _received(receive, most)
        await self.app(scope, receive, send)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a request, and write a line of the log."""
        route = getattr(scope.get("route"), "path", "other")
        self.metrics.requests.labels(route, str(status)).inc()
        self.metrics.duration.observe(seconds)
        known = {
            "method": scope["method"],
            "route": route,
            "status": status,
            "ms": round(seconds * 1000),
            "owner": scope.get("state", {}).get("owner"),
        }
        LOG.info("%s", json.dumps(known))


def _where(error: BaseException) -> list[str]:
    """Where an error was raised, the innermost function last. Its message is left out, as it may quote a request."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in frames[-6:]]


def _host(header: str) -> str:
    """The name in a header ``Host``, without the port."""
    name, colon, port = header.rpartition(":")
    return (name if colon and port.isdecimal() else header).strip("[]").lower()


def too_large(most: int) -> ApiError:
    return ApiError(413, "too_large", f"body: expected at most {most:,} bytes, got more")


def error_response(error: ApiError) -> Response:
    """The response to an error."""
    return JSONResponse(error.body(), error.status, headers=error.headers())


async def _received(receive: Receive, most: int) -> Receive:
    """Receive the whole body of a request, and return a function that gives it to the application."""
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    break
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > most:
                    raise too_large(most)
    except TimeoutError:
        raise ApiError(408, "timeout", "body: expected it within a minute, got a part of it") from None
    is_given = False

    async def again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": bytes(body), "more_body": False}

    return again
