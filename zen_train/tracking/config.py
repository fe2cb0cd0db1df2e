"""Typed form of `conf/logger/*.yaml`. Light on purpose: imports neither Lightning nor W&B."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0, le=3600, strict=False)]
WandbMode = Literal["auto", "online", "offline", "disabled"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class CsvConfig(_Section):
    """Curves as a CSV file; there is no way to switch it off."""

    flush_every_n_rows: Annotated[int, Field(gt=0)] = Field(
        default=10, description="rows that a crash may lose"
    )


class WandbConfig(_Section):
    """Weights & Biases. Nothing here can make a run prompt, hang or fail."""

    mode: WandbMode = Field(
        default="auto", description="auto: WANDB_MODE, else online with a key, else offline"
    )
    project: Annotated[str, Field(min_length=1)] = "zen_train"
    entity: str | None = Field(default=None, description="team or user; null: the default of the key")
    group: str | None = None
    tags: tuple[str, ...] = Field(default=(), strict=False)
    connect_timeout_s: Seconds = Field(
        default=5.0, description="server must accept a connection within this time"
    )
    init_timeout_s: Seconds = Field(default=30.0, description="server must accept the run within this time")
    finish_timeout_s: Seconds = Field(default=300.0, description="longest wait for the last upload")


class LoggerConfig(_Section):
    """Where the curves of a run go."""

    csv: CsvConfig = CsvConfig()
    wandb: WandbConfig = WandbConfig()
