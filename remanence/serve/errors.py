"""Errors as HTTP responses, in the form that OpenAI's API has."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from typing import Any

from remanence.runtime.errors import DivergedError, first_line
from remanence.serve.database import ConflictError
from remanence.serve.engine import BusyError, CancelledError, TimeLimitError
from remanence.serve.memories import NotFoundError
from remanence.serve.store import StoreError

PARAMETER = re.compile(r"([a-z_][\w.]*): ")
"""The name of an argument at the start of a message."""


class ApiError(Exception):
    """An error with a status code: ``raise ApiError(404, "model_not_found", "model: expected ...")``.

    Args:
        status: the HTTP status code.
        code: the machine-readable reason.
        message: one line that names the argument, what was expected and what came.
        retry_after: seconds after which the request can be sent again; None: not known.
    """

    def __init__(self, status: int, code: str, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retry_after = status, code, message, retry_after

    @property
    def kind(self) -> str:
        """The type of the error in OpenAI's API."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """The content of the response."""
        found = PARAMETER.match(self.message)
        error = {
            "message": self.message,
            "type": self.kind,
            "param": found[1] if found and self.status < 500 else None,
            "code": self.code,
        }
        return {"error": error}

    def headers(self) -> Mapping[str, str]:
        """The headers of the response."""
        found = {}
        if self.retry_after is not None:
            found["Retry-After"] = str(max(1, round(self.retry_after)))
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found


KNOWN: list[tuple[type[Exception], int, str]] = [
    (NotFoundError, 404, "not_found"),
    (ConflictError, 409, "conflict"),
    (BusyError, 503, "overloaded"),
    (TimeLimitError, 504, "timeout"),
    (CancelledError, 503, "unavailable"),
    (StoreError, 503, "unavailable"),
    (DivergedError, 422, "diverged"),
    (ValueError, 400, "invalid_value"),
]
"""For types of errors, the status and the code; the first that fits."""


def api_error(error: Exception) -> ApiError | None:
    """The response to an error that a request can cause; None for errors of the server."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code in KNOWN:
        if isinstance(error, kind):
            retry_after = 1.0 if status == 503 else None
            return ApiError(status, code, first_line(error), retry_after=retry_after)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ApiError(507, "insufficient_storage", "server: expected space for the memory, got a full disk")
    return None


INTERNAL = ApiError(500, "internal_error", "server: an internal error; its log says where")
"""The response to errors of the server."""
