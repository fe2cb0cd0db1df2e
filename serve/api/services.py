"""What the routes work with, put together by the composition root."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zen_train.serve.api.history import History
from zen_train.serve.api.keys import Keys
from zen_train.serve.api.metrics import Metrics
from zen_train.serve.api.plan import Bounds
from zen_train.serve.api.text import TextModel, TextModels
from zen_train.serve.engine.interface import Engine
from zen_train.serve.errors import UnknownModelError
from zen_train.serve.router.router import Router
from zen_train.serve.store import Catalogue
from zen_train.serve.types import Variant


@dataclass(frozen=True, kw_only=True)
class BaseFacts:
    """The base as the API names it."""

    name: str
    folder: Path
    fingerprint: str
    """Root of its fingerprint, hexadecimal."""
    created_unix_s: int


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Bounds of one HTTP request."""

    max_body_bytes: int
    body_timeout_s: float
    max_requests: int


@dataclass(frozen=True, kw_only=True)
class Services:
    """One server's parts, for the routes."""

    base: BaseFacts
    engine: Engine
    catalogue: Catalogue
    router: Router
    texts: TextModels
    metrics: Metrics
    history: History
    keys: Keys
    bounds: Bounds
    limits: RequestLimits

    def variant(self, model: str) -> Variant | None:
        """What a model name means now; None is the base.

        Raises:
            UnknownModelError: nothing.
            VariantUnusableError: an artifact that is there and cannot be served, with the reason.
        """
        try:
            return self.router.variant(model)
        except UnknownModelError:
            self.catalogue.get(model)  # its error says more: near names, or what is wrong with the artifact
            raise

    async def text(self, variant: Variant | None) -> TextModel:
        """Tokenizer and chat template: the variant's own, or the base's."""
        if variant is None:
            return await self.texts.get(self.base.folder, None)
        return await self.texts.get(variant.folder, variant.content_hash)

    def fingerprint(self, variant: Variant | None) -> str:
        """`system_fingerprint`: which weights answer."""
        return f"fp_{(variant.content_hash if variant else self.base.fingerprint)[:16]}"
