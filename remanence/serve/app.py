"""The application: routes, errors, health, metrics and the page."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import ASGIApp

from remanence import __version__
from remanence.serve import memory_routes, openai, schemas
from remanence.serve.access import Access
from remanence.serve.errors import INTERNAL, KNOWN, ApiError, api_error
from remanence.serve.gate import Gate, error_response
from remanence.serve.metrics import CONTENT_TYPE_LATEST
from remanence.serve.service import Service
from remanence.serve.streams import ClientLeftError

PAGE = Path(__file__).parent / "page"
"""The folder of the web page."""
PAGE_FILES = {"": "index.html", "page.css": "page.css", "page.js": "page.js"}
"""The files of the page, by their paths on the server."""
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
SOURCES = ("body", "query", "path", "header")
"""The parts of a request."""
PLACE = re.compile(r"(?!str$|int$|float$|bool$)[a-z0-9_]+")
"""Matches the name of a field, or the index in a list."""
ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": schemas.Error}
    for code in (400, 401, 404, 405, 408, 409, 413, 421, 422, 429, 500, 503, 504, 507)
}
"""The errors of all routes, for the schema."""


def make_app(
    service: Service, access: Access, model: str, *, hosts: Collection[str] | None = None
) -> ASGIApp:
    """Return the application that serves a model under a name; see `Gate` for `hosts`."""
    app = FastAPI(
        title="remanence",
        summary="A language model with a memory for each user, in the form of OpenAI's API.",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        responses=ERRORS,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    key = HTTPBearer(auto_error=False, description="An API key, if the server has keys.")
    for routes in (openai.router(service, model), memory_routes.router(service, access)):
        app.include_router(routes, dependencies=[Security(key)])  # for the schema: `Gate` checks it
    _add_health(app, service)
    _add_page(app)
    _add_errors(app)
    return Gate(app, access, service.metrics, hosts=hosts)


def _add_health(app: FastAPI, service: Service) -> None:
    """Add the routes that tell how the server is."""
    engine, metrics = service.engine, service.metrics
    metrics.watch("active_requests", "Requests that are read or answered now.", lambda: engine.num_active)
    metrics.watch(
        "requests_under_way", "Requests for answers, waiting ones too.", lambda: service.num_requests
    )
    metrics.watch("tokens_read", "Tokens of prompts, since the start.", lambda: engine.tokens_read)
    metrics.watch("tokens_generated", "Tokens of answers, since the start.", lambda: engine.tokens_generated)
    metrics.watch("cached_bytes", "Size of the memories in RAM.", lambda: service.memories.cached_bytes)

    @app.get("/healthz", tags=["Server"], summary="Whether the server works")
    def healthz() -> dict[str, str]:
        if not engine.is_alive:
            raise ApiError(503, "unavailable", "engine: expected one that runs, got one that has stopped")
        return {"status": "ok"}

    @app.get("/readyz", tags=["Server"], summary="Whether the server takes requests")
    def readyz() -> dict[str, str]:
        if not engine.is_running:
            raise ApiError(503, "unavailable", "server: expected one that takes requests, got one that stops")
        return {"status": "ready"}

    @app.get("/metrics", tags=["Server"], summary="Metrics for Prometheus", response_class=Response)
    def show_metrics() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_page(app: FastAPI) -> None:
    """Add the web page."""
    for path, name in PAGE_FILES.items():

        def show(name: str = name) -> Response:
            return FileResponse(PAGE / name, headers=PAGE_HEADERS)

        app.add_api_route(f"/{path}", show, methods=["GET"], include_in_schema=False)


def _add_errors(app: FastAPI) -> None:
    """Give errors the form of OpenAI's API."""

    def known(_: Request, error: Exception) -> Response:
        return error_response(api_error(error) or INTERNAL)

    kinds: list[type[Exception]] = [ApiError, OSError, *(kind for kind, *_ in KNOWN)]
    for kind in kinds:
        app.add_exception_handler(kind, known)

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = []
        for each in first["loc"]:
            if not PLACE.fullmatch(str(each)):  # the name of a type that the value could have
                break
            place += [] if each in SOURCES else [str(each)]
        what = first["msg"].removeprefix("Value error, ")
        message = f"{'.'.join(place) or 'body'}: {what}"
        return error_response(ApiError(400, "invalid_value", message))

    @app.exception_handler(HTTPException)
    def http(_: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        message = f"request: {error.detail}"
        response = error_response(ApiError(error.status_code, code, message))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientLeftError)
    def left(_: Request, error: ClientLeftError) -> Response:
        return JSONResponse({}, 499)

    @app.exception_handler(Exception)
    def internal(_: Request, error: Exception) -> Response:
        return error_response(INTERNAL)
