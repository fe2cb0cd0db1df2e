"""The errors of serving, each with its HTTP status and its type in OpenAI's error body.

A caller can cause every one of them. The message names the thing, the value got, what is allowed and the remedy.
What the server itself broke is no `ServeError`; the API answers 500 for it and the log has the traceback.
"""

from __future__ import annotations

from zen_train.errors import ZenTrainError


class ServeError(ZenTrainError):
    """A request that is not answered as asked."""

    status: int = 500
    type: str = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequestError(ServeError):
    """A value in the request that is not allowed."""

    status, type = 400, "invalid_request_error"


class AuthenticationError(ServeError):
    """No API key, or a wrong one."""

    status, type, code = 401, "invalid_request_error", "invalid_api_key"


class UnknownModelError(ServeError):
    """A model name that is neither the base nor a variant."""

    status, type, code = 404, "invalid_request_error", "model_not_found"


class ConflictError(ServeError):
    """A change that does not fit what is there: a variant that exists already, or is in use."""

    status, type = 409, "invalid_request_error"


class TooLargeError(ServeError):
    """A body, prompt, output or variant above its limit."""

    status, type = 413, "invalid_request_error"


class QueueFullError(ServeError):
    """A bounded queue of one variant is full."""

    status, type, code = 429, "rate_limit_error", "queue_full"


class VariantUnusableError(ServeError):
    """A variant that cannot be loaded: damaged, vanished, for another base, or of a form the engine does not serve."""

    status, type, code = 503, "server_error", "variant_unusable"


class OverloadedError(ServeError):
    """No room now: every slot is in use, or the server is draining."""

    status, type, code = 503, "server_error", "overloaded"


class EngineDeadError(ServeError):
    """The engine stopped or hangs; nothing can be answered until the server is started again."""

    status, type, code = 503, "server_error", "engine_dead"


class DeadlineError(ServeError):
    """The request's deadline passed before it was finished."""

    status, type, code = 504, "server_error", "deadline_exceeded"
