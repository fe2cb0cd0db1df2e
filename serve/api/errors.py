"""Every failure in OpenAI's form: `{"error": {"message", "type", "param", "code"}}` with the status of its class.

A `ServeError` says what the caller can do. Anything else that escapes a route is a fault of the server: the log has the
traceback, the caller gets 500 and no detail.
"""

from __future__ import annotations

import http
import logging
import math
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from zen_train.errors import ZenTrainError
from zen_train.serve.errors import ServeError

log = logging.getLogger("zen_train.serve")

_INTERNAL = "the server failed to answer this request; its log has the details"


def error_body(error: BaseException) -> dict[str, Any]:
    """The `error` object of any exception."""
    if isinstance(error, ServeError):
        return {"message": str(error), "type": error.type, "param": error.param, "code": error.code}
    return {"message": _INTERNAL, "type": "server_error", "param": None, "code": "internal_error"}


def error_response(error: BaseException) -> Response:
    """The HTTP answer of any exception."""
    headers = {}
    status = 500
    if isinstance(error, ServeError):
        status = error.status
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        if status == http.HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        if status in (http.HTTPStatus.REQUEST_TIMEOUT, http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
            headers["Connection"] = "close"  # the rest of the body is not read
    return json_response({"error": error_body(error)}, status=status, headers=headers)


def json_response(content: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON by orjson; NaN and infinity become null."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def install_error_handlers(app: FastAPI) -> None:
    """Answer framework errors (404, 405, ...) and our own in the same form."""

    async def framework(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        body = {
            "message": f"{error.detail}; the routes are listed at /openapi.json",
            "type": "invalid_request_error",
            "param": None,
            "code": http.HTTPStatus(error.status_code).name.lower(),
        }
        return json_response({"error": body}, status=error.status_code, headers=dict(error.headers or {}))

    async def ours(_: Request, error: Exception) -> Response:
        if not isinstance(error, ServeError):
            log.error("a request failed", exc_info=error)
        return error_response(error)

    app.add_exception_handler(HTTPException, framework)
    app.add_exception_handler(ZenTrainError, ours)
    app.add_exception_handler(Exception, ours)
