"""Errors that only HTTP knows, beside those of `zen_train.serve.errors`."""

from __future__ import annotations

from zen_train.serve.errors import ServeError


class ForbiddenError(ServeError):
    """A valid key that may not do this."""

    status, type, code = 403, "invalid_request_error", "admin_key_required"


class RequestTimeoutError(ServeError):
    """A request that its client did not finish sending."""

    status, type, code = 408, "invalid_request_error", "request_timeout"


class UnsupportedMediaError(ServeError):
    """A body that does not say it is JSON."""

    status, type, code = 415, "invalid_request_error", "unsupported_media_type"
