"""What `submit` refuses at once: requests that could never run, and queues that are full.

A refusal for lack of room carries Retry-After: the requests ahead, divided by the rate at which places were
given lately, between 1 second and the configured bound. Without a recent rate it is the bound's tenth: nobody
knows, and soon is cheap.
"""

from __future__ import annotations

import math

from zen_train.serve.errors import BadRequestError, OverloadedError, QueueFullError
from zen_train.serve.router.config import RouterConfig
from zen_train.serve.router.gauges import DecayedRate
from zen_train.serve.router.lane import Lane
from zen_train.serve.router.request import RoutedRequest
from zen_train.serve.types import EngineLimits


class Admission:
    """Stateless but for what it was built with."""

    def __init__(self, *, config: RouterConfig, limits: EngineLimits) -> None:
        self._config = config
        self._limits = limits

    def check_request(self, request: RoutedRequest) -> None:
        """Raises BadRequestError for a job that the engine could not run even alone."""
        prompt, output = len(request.prompt_tokens), request.max_tokens
        if prompt < 1:
            raise BadRequestError("the prompt has 0 tokens; send at least one", param="prompt")
        if output < 1:
            raise BadRequestError(f"max_tokens is {output}; ask for at least 1", param="max_tokens")
        bound = min(self._limits.context_tokens, self._limits.kv_tokens)
        if prompt + output > bound:
            raise BadRequestError(
                f"prompt ({prompt} tokens) and max_tokens ({output}) are {prompt + output} together, and at "
                f"most {bound} fit; shorten the prompt or lower max_tokens",
                param="max_tokens" if prompt < bound else "prompt",
            )
        for name in ("queue_deadline_s", "total_deadline_s"):
            value = getattr(request, name)
            if value is not None and not (0.0 < value < math.inf):
                raise BadRequestError(f"{name} is {value}; give seconds above 0, or leave it out", param=name)

    def check_room(self, lane: Lane, *, queued_total: int, place_rate: DecayedRate, now_s: float) -> None:
        """Raises QueueFullError (429) for the variant's queue, OverloadedError (503) for all together."""
        per_s = place_rate.per_s(now_s)
        if len(lane.queue) >= self._config.max_queue_per_variant:
            raise QueueFullError(
                f"{len(lane.queue)} requests wait for {lane.title}, the most allowed; try again later",
                retry_after_s=self.retry_after_s(len(lane.queue), per_s),
            )
        if queued_total >= self._config.max_queue_total:
            raise OverloadedError(
                f"{queued_total} requests wait in all, the most allowed; try again later",
                retry_after_s=self.retry_after_s(queued_total, per_s),
            )

    def retry_after_s(self, ahead: int, per_s: float) -> float:
        """Whole seconds until `ahead` requests were given places."""
        bound_s = self._config.retry_after_max_s
        if per_s * bound_s < 1e-3:
            return max(math.ceil(bound_s / 10.0), 1)
        return min(max(math.ceil(ahead / per_s), 1), max(math.floor(bound_s), 1))
