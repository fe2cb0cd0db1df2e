"""What the router may be told: bounds of queues, of waiting, and of loading. Checked once, frozen after that.

How the values work together is in `README.md` of this folder.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from zen_train.serve.cache.config import PolicyConfig

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class RouterConfig(BaseModel):
    """A key it does not know is an error, and so is a value out of bounds."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_queue_per_variant: Positive = Field(64, description="requests; one more gets 429")
    max_queue_total: Positive = Field(512, description="requests over all variants; one more gets 503")

    starvation_s: Seconds = Field(
        2.0,
        description="a variant with waiting requests that got no place for this long goes first; a cold one "
        "claims the slot of a busy variant after half of it",
    )
    output_weight: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = Field(
        4.0, description="what an output token costs in prompt tokens when variants share scarce places"
    )
    kv_headroom_tokens: Positive = Field(
        256,
        description="output tokens for which a job is given KV room at its start; the engine preempts beyond",
    )

    max_parallel_loads: Positive = Field(4, description="variants read from disk side by side")
    max_load_bytes: Positive = Field(
        4 << 30, description="device bytes being loaded side by side; one load is always allowed"
    )

    queue_deadline_s: Seconds = Field(
        60.0, description="until a place in the engine, unless the request says"
    )
    total_deadline_s: Seconds = Field(1800.0, description="until the last token, unless the request says")
    unload_grace_s: Seconds = Field(
        30.0, description="how long running requests of a variant that is unloaded may go on"
    )

    hang_s: Seconds = Field(10.0, description="an engine with work and no step for this long is given up")
    watch_interval_s: Seconds = Field(0.5, description="how often the engine is looked at")

    retry_after_max_s: Seconds = Field(
        60.0, description="upper bound of the Retry-After that a refusal carries"
    )
    cache: PolicyConfig = Field(PolicyConfig(), description="what stays on the device")
    window_s: Seconds = Field(300.0, description="over how long P50 and P99 are taken")

    @model_validator(mode="after")
    def _bounds_agree(self) -> RouterConfig:
        if self.max_queue_total < self.max_queue_per_variant:
            raise ValueError(
                f"max_queue_total={self.max_queue_total} is below max_queue_per_variant="
                f"{self.max_queue_per_variant}: raise the first or lower the second"
            )
        if self.cache.minimum_residency_s > self.starvation_s:
            raise ValueError(
                f"cache.minimum_residency_s={self.cache.minimum_residency_s} is above starvation_s="
                f"{self.starvation_s}: a busy variant could keep its slot beyond the bound; lower the first "
                "or raise the second"
            )
        return self
