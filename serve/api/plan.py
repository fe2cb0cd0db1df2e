"""A checked request as the sequences to generate: prompts in tokens, settings in the router's terms.

Bounds that depend on the model (context, vocabulary) or on this server's limits are checked here;
everything that a schema can say has been checked before.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zen_train.serve.api.schema import ChatRequest, CompletionRequest, Generation
from zen_train.serve.api.text import TextModel, TextModels
from zen_train.serve.errors import BadRequestError, TooLargeError
from zen_train.serve.router.request import RoutedRequest
from zen_train.serve.types import Sampling

_COMPLETION_TOKENS = 16  # OpenAI's default


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What one request may ask for."""

    context_tokens: int
    max_prompt_tokens: int
    max_output_tokens: int
    max_choices: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a request comes to. Its sequences are ordered prompt by prompt, `n` of each."""

    text: TextModel
    requests: tuple[RoutedRequest, ...]
    stops: tuple[str, ...]
    echo: tuple[str, ...]
    """Text before each sequence; empty strings without `echo`."""
    prompt_tokens: int
    """Each prompt counted once, as OpenAI bills it."""


async def plan_chat(
    body: ChatRequest, text: TextModel, texts: TextModels, bounds: Bounds, content_hash: str | None
) -> Plan:
    """Raises BadRequestError and TooLargeError, with the field."""
    if body.top_logprobs and not body.logprobs:
        raise BadRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    messages = [
        {"role": "system" if message.role == "developer" else message.role, "content": message.text()}
        for message in body.messages
    ]
    prompt = await texts.encode_chat(text, messages)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if (
        None not in (body.max_tokens, body.max_completion_tokens)
        and body.max_tokens != body.max_completion_tokens
    ):
        raise BadRequestError(
            "max_tokens and max_completion_tokens differ; send one of them", param="max_tokens"
        )
    return _plan(body, text, bounds, content_hash, prompts=[prompt], field="messages", logprobs=logprobs,
                 max_tokens=body.max_completion_tokens or body.max_tokens)  # fmt: skip


async def plan_completion(
    body: CompletionRequest, text: TextModel, texts: TextModels, bounds: Bounds, content_hash: str | None
) -> Plan:
    """Raises BadRequestError and TooLargeError, with the field."""
    if body.echo and body.logprobs is not None:
        raise BadRequestError(
            "echo with logprobs needs the prompt's log probabilities, which are not kept", param="echo"
        )
    given = _prompts(body.prompt)
    if len(given) * (body.n or 1) > bounds.max_choices:
        raise BadRequestError(
            f"{len(given)} prompts with n={body.n or 1} are {len(given) * (body.n or 1)} sequences; "
            f"at most {bounds.max_choices} in one request",
            param="prompt",
        )
    prompts = [await texts.encode(text, prompt) if isinstance(prompt, str) else prompt for prompt in given]
    echo = None
    if body.echo:
        echo = [
            prompt if isinstance(prompt, str) else text.decode(_known(prompt, text, "prompt"))
            for prompt in given
        ]
    return _plan(body, text, bounds, content_hash, prompts=prompts, field="prompt", logprobs=body.logprobs,
                 max_tokens=body.max_tokens or _COMPLETION_TOKENS, echo=echo)  # fmt: skip


def _plan(
    body: Generation,
    text: TextModel,
    bounds: Bounds,
    content_hash: str | None,
    *,
    prompts: Sequence[Sequence[int]],
    field: str,
    logprobs: int | None,
    max_tokens: int | None,
    echo: Sequence[str] | None = None,
) -> Plan:
    choices = body.n or 1
    if len(prompts) * choices > bounds.max_choices:
        raise BadRequestError(f"n={choices} is above this server's {bounds.max_choices}", param="n")
    if body.stream_options is not None and not body.stream:
        raise BadRequestError("stream_options needs stream: true", param="stream_options")
    stop_tokens = frozenset(_known(body.stop_token_ids or (), text, "stop_token_ids"))
    if not body.ignore_eos:
        stop_tokens |= text.end_tokens
    request_id = secrets.token_hex(8)
    requests: list[RoutedRequest] = []
    for prompt in prompts:
        room = _output_tokens(len(prompt), max_tokens, bounds, field)
        if (body.min_tokens or 0) > room:
            raise BadRequestError(
                f"min_tokens={body.min_tokens} is above max_tokens={room}", param="min_tokens"
            )
        for copy in range(choices):
            requests.append(
                RoutedRequest(
                    id=f"{request_id}-{len(requests)}",
                    model=body.model,
                    prompt_tokens=tuple(_known(prompt, text, field)),
                    max_tokens=room,
                    stop_tokens=stop_tokens,
                    min_tokens=body.min_tokens or 0,
                    sampling=_sampling(body, text, logprobs, copy),
                    content_hash=content_hash,
                )
            )
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return Plan(
        text=text,
        requests=tuple(requests),
        stops=stops,
        echo=tuple(piece for piece in echo or [""] * len(prompts) for _ in range(choices)),
        prompt_tokens=sum(map(len, prompts)),
    )


def _sampling(body: Generation, text: TextModel, logprobs: int | None, copy: int) -> Sampling:
    """Defaults are OpenAI's. Copies of one prompt differ in their seed, as they differ without one."""
    seed = None if body.seed is None else (body.seed + copy) % 2**63
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias or {}, text),
        seed=seed,
        logprobs=logprobs,
    )


def _logit_bias(given: Mapping[str, float], text: TextModel) -> dict[int, float]:
    if wrong := [key for key in given if not (key.isascii() and key.isdigit() and len(key) < 12)]:
        raise BadRequestError(f"logit_bias key {wrong[0][:40]!r} is no token id", param="logit_bias")
    tokens = _known([int(key) for key in given], text, "logit_bias")
    return dict(zip(tokens, given.values(), strict=True))


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The prompts of a completion: one string, one list of tokens, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise BadRequestError("prompt is an empty list", param="prompt")
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [part for part in prompt if not isinstance(part, int)]


def _known(tokens: Sequence[int], text: TextModel, field: str) -> Sequence[int]:
    if tokens and max(tokens) >= text.vocabulary:
        raise BadRequestError(
            f"{field} has token {max(tokens)}; this model has 0 to {text.vocabulary - 1}", param=field
        )
    return tokens


def _output_tokens(prompt_tokens: int, asked: int | None, bounds: Bounds, field: str) -> int:
    """How many tokens may be generated after a prompt of this length."""
    if not prompt_tokens:
        raise BadRequestError(f"{field} has no tokens", param=field)
    if prompt_tokens > bounds.max_prompt_tokens or prompt_tokens >= bounds.context_tokens:
        allowed = min(bounds.max_prompt_tokens, bounds.context_tokens - 1)
        raise ContextLengthError(f"{field} has {prompt_tokens} tokens; at most {allowed} fit", param=field)
    room = bounds.context_tokens - prompt_tokens
    if asked is None:
        return min(room, bounds.max_output_tokens)
    if asked > bounds.max_output_tokens:
        raise BadRequestError(
            f"max_tokens={asked} is above this server's {bounds.max_output_tokens}", param="max_tokens"
        )
    if asked > room:
        raise ContextLengthError(
            f"{prompt_tokens} prompt tokens and max_tokens={asked} exceed the context of "
            f"{bounds.context_tokens} tokens; lower max_tokens to {room}",
            param="max_tokens",
        )
    return asked


class ContextLengthError(TooLargeError):
    """A prompt or output beyond the model's context; OpenAI answers 400 for it."""

    status, code = 400, "context_length_exceeded"
