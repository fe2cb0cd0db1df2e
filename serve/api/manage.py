"""What is served, and changing it: `/v1/models`, load and unload (named as vLLM names them), pin and unpin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from zen_train.serve.api.body import Schema, read_body
from zen_train.serve.api.errors import json_response
from zen_train.serve.api.schema import LoadRequest, PinRequest, UnloadRequest
from zen_train.serve.api.services import Services
from zen_train.serve.types import Variant


def manage_routes(services: Services) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    limits, router = services.limits, services.router

    async def body(request: Request, schema: type[Schema]) -> Schema:
        return await read_body(
            request, schema, max_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s
        )

    def card(name: str) -> dict[str, Any]:
        variant = services.variant(name)
        return _variant_card(services, name, variant) if variant else _base_card(services)

    @routes.get("/v1/models", operation_id="list_models")
    async def models() -> Response:
        """The base first, then the variants by name."""
        return json_response(
            {"object": "list", "data": [card(view.name) for view in router.snapshot().variants]}
        )

    @routes.get("/v1/models/{model:path}", operation_id="retrieve_model")
    async def model(model: str) -> Response:
        """One model."""
        return json_response(card(model))

    @routes.post("/v1/load_lora_adapter", operation_id="load_variant")
    async def load(request: Request) -> Response:
        """Serve an artifact folder under a name; `load_inplace` replaces what the name meant."""
        wanted = await body(request, LoadRequest)
        loaded = await router.load(
            wanted.lora_name, Path(wanted.lora_path), inplace=bool(wanted.load_inplace)
        )
        return json_response(
            _variant_card(services, wanted.lora_name, loaded.variant) | {"on_device": loaded.on_device}
        )

    @routes.post("/v1/unload_lora_adapter", operation_id="unload_variant")
    async def unload(request: Request) -> Response:
        """Serve a name no longer: its next request is 404, running ones finish within a grace, its bytes are freed."""
        wanted = await body(request, UnloadRequest)
        await router.unload(wanted.lora_name)
        return json_response({"id": wanted.lora_name, "object": "model", "deleted": True})

    @routes.post("/v1/pin", operation_id="pin_variant")
    async def pin(request: Request) -> Response:
        """Keep a variant on the device."""
        wanted = await body(request, PinRequest)
        loaded = await router.pin(wanted.model)
        return json_response({"id": wanted.model, "pinned": True, "on_device": loaded.on_device})

    @routes.post("/v1/unpin", operation_id="unpin_variant")
    async def unpin(request: Request) -> Response:
        """Let a variant leave the device when others need the room."""
        wanted = await body(request, PinRequest)
        await router.unpin(wanted.model)
        return json_response({"id": wanted.model, "pinned": False})

    return routes


def _base_card(services: Services) -> dict[str, Any]:
    base = services.base
    return {
        "id": base.name,
        "object": "model",
        "created": base.created_unix_s,
        "owned_by": "zen_train",
        "root": base.name,
        "parent": None,
        "content_hash": base.fingerprint,
        "max_model_len": services.bounds.context_tokens,
    }


def _variant_card(services: Services, name: str, variant: Variant) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": variant.created_unix_s,
        "owned_by": "zen_train",
        "root": variant.name,
        "parent": services.base.name,
        "content_hash": variant.content_hash,
        "max_model_len": services.bounds.context_tokens,
    }
