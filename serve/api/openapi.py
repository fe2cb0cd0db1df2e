"""The API's own OpenAPI document: FastAPI knows the routes, this adds their bodies, answers and errors.

Bodies are parsed in `body.py`, not by FastAPI, so their schemas are put in here from the same models.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from zen_train.serve.api.schema import (
    Body,
    ChatRequest,
    CompletionRequest,
    LoadRequest,
    PinRequest,
    UnloadRequest,
)

_REF = "#/components/schemas/"
_BODIES: dict[str, type[Body]] = {
    "create_chat_completion": ChatRequest,
    "create_completion": CompletionRequest,
    "load_variant": LoadRequest,
    "unload_variant": UnloadRequest,
    "pin_variant": PinRequest,
    "unpin_variant": PinRequest,
}
_OBJECTS: dict[str, list[str]] = {
    "create_chat_completion": ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"],
    "create_completion": ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"],
    "list_models": ["object", "data"],
    "retrieve_model": ["id", "object", "created", "owned_by", "root", "parent", "content_hash"],
    "load_variant": ["id", "object", "created", "owned_by", "root", "parent", "content_hash"],
    "unload_variant": ["id", "object", "deleted"],
    "pin_variant": ["id", "pinned"],
    "unpin_variant": ["id", "pinned"],
    "health": ["status"],
    "ready": ["status"],
    "version": ["version"],
    "status": ["base", "ready", "variants", "history"],
}
_STREAMED = ("create_chat_completion", "create_completion")
_ERRORS = {
    "400": "a field that is unknown, missing, of a wrong type or out of bounds",
    "401": "no API key, or one that is not known",
    "403": "a key that may not do this",
    "404": "no such model",
    "408": "the request was not complete in time",
    "409": "the change does not fit what is there",
    "413": "larger than this server takes",
    "415": "not application/json",
    "429": "the queue of this variant is full; see Retry-After",
    "500": "a fault of the server",
    "503": "no room now, or the variant cannot be loaded; see Retry-After",
    "504": "the deadline passed",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(app: FastAPI, *, keys_required: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document of `app`."""
    whole = get_openapi(title="zen_train.serve", version="1", routes=app.routes)
    schemas = whole.setdefault("components", {}).setdefault("schemas", {})
    _, definitions = models_json_schema(
        [(model, "validation") for model in _BODIES.values()], ref_template=_REF + "{model}"
    )
    schemas |= definitions["$defs"]
    schemas["Error"] = _ERROR
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for path, operations in whole["paths"].items():
        for operation in operations.values():
            _complete(operation, guarded=keys_required and path.startswith(("/v1/", "/status.json")))
    if keys_required:
        whole["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return whole


def _complete(operation: dict[str, Any], *, guarded: bool) -> None:
    name = operation["operationId"]
    if name in _BODIES:
        schema = {"$ref": _REF + _BODIES[name].__name__}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    kind = "text/plain" if name == "metrics" else "application/json"
    answer: dict[str, Any] = (
        {"type": "string"} if name == "metrics" else {"type": "object", "required": _OBJECTS[name]}
    )
    content: dict[str, Any] = {kind: {"schema": answer}}
    if name in _STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    operation["responses"] = {"200": {"description": "the answer", "content": content}}
    failure = {"schema": {"$ref": _REF + "Error"}}
    for status, text in _ERRORS.items():
        operation["responses"][status] = {"description": text, "content": {"application/json": failure}}
    if name == "ready":
        reason = {"schema": {"type": "object", "required": ["status", "reason"]}}
        operation["responses"]["503"] = {"description": "not now", "content": {"application/json": reason}}
    if guarded:
        operation["security"] = [{"key": []}]
