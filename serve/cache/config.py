"""What the cache policy may be told. The defaults are those that `scripts/simulate_cache.py` showed best."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class PolicyConfig(BaseModel):
    """A key it does not know is an error, and so is a value out of bounds."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    half_lives_s: tuple[Seconds, ...] = Field(
        (4.0, 64.0, 1024.0, 16384.0),
        strict=False,
        max_length=16,
        description="how fast past requests may lose weight; the policy follows the one that would have loaded "
        "least lately, plain LRU included",
    )
    newcomer_margin: Annotated[float, Field(ge=1.0, le=100.0)] = Field(
        1.5,
        description="how much busier than the quietest other the variant loaded last must be to outlive it",
    )
    load_overhead_bytes: Annotated[int, Field(ge=0)] = Field(
        0, description="what a load costs beside its bytes, in bytes that could be read meanwhile"
    )
    minimum_residency_s: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = Field(
        0.25,
        description="how long a loaded variant stays, unless a load is urgent; about ten times what a load takes",
    )
    auto_pins: Annotated[int, Field(ge=0, le=1024)] = Field(
        1, description="the busiest variants that stay unless a load is urgent; 0: none"
    )
    auto_pin_margin: Annotated[float, Field(ge=1.0, le=100.0)] = Field(
        1.5, description="how much busier than the quietest of them a variant must be to take its place"
    )
    auto_pin_requests: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = Field(
        8.0, description="decayed requests below which nothing is pinned by itself"
    )
    auto_pin_share: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.5, description="of the budget, at most, for automatic pins"
    )
    traffic_half_life_s: Seconds = Field(
        60.0, description="half-life of the request rate that is reported and that automatic pins follow"
    )
    remembered: Annotated[int, Field(ge=16)] = Field(
        4096, description="variants whose request rate is remembered, on the tier or not"
    )
