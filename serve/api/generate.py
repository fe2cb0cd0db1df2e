"""The two routes that generate: `POST /v1/completions` and `POST /v1/chat/completions`, whole or streamed.

A stream's status is sent once its first choice has something to say, so that a variant that cannot be
loaded, a full queue or a deadline is an HTTP error and no broken stream.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence

from fastapi import APIRouter, Request, Response

from zen_train.serve.api.body import read_body
from zen_train.serve.api.choice import Choice, Ended, Piece, TokenEntry
from zen_train.serve.api.errors import json_response
from zen_train.serve.api.forms import ChatForm, CompletionForm, Form, usage
from zen_train.serve.api.plan import Plan, plan_chat, plan_completion
from zen_train.serve.api.schema import ChatRequest, CompletionRequest, Generation
from zen_train.serve.api.services import Services
from zen_train.serve.api.sse import EventStream, cancelled_when_gone, for_each
from zen_train.serve.errors import ConflictError
from zen_train.serve.types import Variant

_ATTEMPTS = 3

MakePlan = Callable[[Variant | None], Awaitable[Plan]]
Whole = tuple[str, tuple[TokenEntry, ...], Ended]


def generate_routes(services: Services) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    limits, bounds = services.limits, services.bounds

    @routes.post("/v1/chat/completions", operation_id="create_chat_completion")
    async def chat(request: Request) -> Response:
        """Answer a conversation, with the chat template of the model that is asked."""
        body = await read_body(
            request, ChatRequest, max_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s
        )

        async def plan(variant: Variant | None) -> Plan:
            text, hash_ = await services.text(variant), variant.content_hash if variant else None
            return await plan_chat(body, text, services.texts, bounds, hash_)

        return await _Generation(
            services, request, body, ChatForm, "chatcmpl", bool(body.logprobs), plan
        ).respond()

    @routes.post("/v1/completions", operation_id="create_completion")
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        body = await read_body(
            request, CompletionRequest, max_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s
        )

        async def plan(variant: Variant | None) -> Plan:
            text, hash_ = await services.text(variant), variant.content_hash if variant else None
            return await plan_completion(body, text, services.texts, bounds, hash_)

        logprobs = body.logprobs is not None
        return await _Generation(services, request, body, CompletionForm, "cmpl", logprobs, plan).respond()

    return routes


class _Generation:
    """One request on its way: planned, submitted, answered."""

    def __init__(
        self,
        services: Services,
        request: Request,
        body: Generation,
        form: type[Form],
        prefix: str,
        logprobs: bool,
        make_plan: MakePlan,
    ) -> None:
        self._services = services
        self._request = request
        self._body = body
        self._form = form
        self._prefix = prefix
        self._logprobs = logprobs
        self._make_plan = make_plan
        self._choices: list[Choice] = []

    async def respond(self) -> Response:
        """The answer. New weights under the name before the first token: the request is planned again for them."""
        async with cancelled_when_gone(self._request.receive, self._cancel):
            for attempt in range(1, _ATTEMPTS + 1):
                variant = self._services.variant(self._body.model)
                plan = await self._make_plan(variant)
                form = self._make_form(variant)
                try:
                    try:
                        await self._submit(plan)
                        if self._body.stream:
                            return self._stream(plan, form, await self._first_piece())
                        return await self._whole(plan, form)
                    except BaseException:
                        self._cancel()
                        raise
                except ConflictError:
                    if attempt == _ATTEMPTS:
                        raise
        raise AssertionError("the last attempt returns or raises")

    def _make_form(self, variant: Variant | None) -> Form:
        options = self._body.stream_options
        return self._form(
            id=f"{self._prefix}-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=self._body.model,
            fingerprint=self._services.fingerprint(variant),
            include_usage=bool(options and options.include_usage),
            logprobs=self._logprobs,
        )

    async def _submit(self, plan: Plan) -> None:
        self._choices.clear()
        for index, request in enumerate(plan.requests):
            ticket = await self._services.router.submit(request)
            self._choices.append(
                Choice(
                    index=index,
                    ticket=ticket,
                    model=plan.text,
                    prompt=request.prompt_tokens,
                    stops=plan.stops,
                    min_tokens=request.min_tokens,
                )
            )
        self._services.metrics.prompt(self._body.model, plan.prompt_tokens)

    def _cancel(self) -> None:
        for choice in self._choices:
            choice.ticket.cancel()

    async def _next(self, choice: Choice) -> Piece:
        """What a choice says next."""
        piece = choice.feed(await choice.ticket.batch())
        now = time.monotonic()
        if choice.delivered:
            self._services.metrics.observe_gap(now - choice.last_s)
        choice.delivered, choice.last_s = True, now
        return piece

    async def _first_piece(self) -> Piece:
        return await self._next(self._choices[0])

    async def _whole(self, plan: Plan, form: Form) -> Response:
        async def collect(choice: Choice) -> Whole:
            texts = [plan.echo[choice.index]]
            entries: list[TokenEntry] = []
            while choice.ended is None:
                piece = await self._next(choice)
                texts.append(piece.text)
                entries += piece.entries
            return "".join(texts), tuple(entries), choice.ended

        choices: Sequence[Whole] = await for_each(self._choices, collect)
        return json_response(form.answer(choices, self._usage(plan)))

    def _stream(self, plan: Plan, form: Form, first: Piece) -> Response:
        async def produce(write: Callable[[bytes], Awaitable[None]]) -> None:
            async def send(choice: Choice) -> None:
                opening = form.opening(choice.index)
                if echo := plan.echo[choice.index]:
                    opening += form.chunk(choice.index, Piece(echo, (), None), 0)
                offset = len(echo)
                piece = first if choice.index == 0 else await self._next(choice)
                while True:
                    events = opening
                    if piece.text or piece.entries or piece.ended:
                        events += form.chunk(choice.index, piece, offset)
                    offset += sum(len(entry.text) for entry in piece.entries)
                    if events:
                        await write(events)
                    if piece.ended:
                        return
                    opening, piece = b"", await self._next(choice)

            await for_each(self._choices, send)
            if self._body.stream_options and self._body.stream_options.include_usage:
                await write(form.usage_chunk(self._usage(plan)))

        return EventStream(produce, cancel=self._cancel)

    def _usage(self, plan: Plan) -> dict[str, int]:
        return usage(plan.prompt_tokens, sum(choice.output_tokens for choice in self._choices))
