"""What the torch engine is built with: typed, frozen, unknown keys refused. It reads no file and knows no
model.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]


class EngineConfig(BaseModel):
    """Budgets are taken once at start (host memory as variants come); nothing grows beyond them while serving."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    device: str = Field("cpu", description="cpu, cuda or cuda:N")
    dtype: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="of weights and activations; auto is the base's own (fp16 is served as fp32)"
    )
    max_jobs: Positive = Field(16, le=1024, description="jobs decoding side by side")
    slots: Positive = Field(
        14,
        le=4096,
        description="sign planes of the whole model kept on the device, or coded directions in their place",
    )
    variant_bytes: Positive | None = Field(
        None, description="the slots as a budget in bytes instead; takes precedence over slots"
    )
    host_bytes: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="host memory (pinned, on a GPU) that keeps variants ready for the device; 0: none; None: a "
        "quarter of the memory for a GPU, none for a CPU, where the system's page cache does that",
    )
    max_planes: Annotated[int, Field(gt=0, le=8)] = Field(
        2, description="sign planes one variant may have; each takes a slot"
    )
    kv_bytes: Positive = Field(512 << 20, description="keys and values of all jobs together")
    context_tokens: Positive | None = Field(
        None, description="prompt and output of one job; None is what the model was made for"
    )
    prefill_chunk_tokens: Positive = Field(256, description="prompt tokens in one step, over all jobs")
    page_tokens: Literal[8, 16, 32, 64] = Field(16, description="tokens of one page of keys and values")
    threads: Positive | None = Field(None, description="CPU threads of a step; None keeps torch's number")
    kernels: Literal["auto", "cpu", "triton", "reference"] = Field(
        "auto",
        description="auto: the device's own, C++ on a CPU, Triton on a GPU; reference: slow, to compare with",
    )
    cuda_graphs: bool = Field(True, description="replay decode steps as CUDA graphs (a GPU only)")
    pad_decode: bool | None = Field(
        None, description="pad decode batches to a power of two; None: where CUDA graphs need it"
    )

    @model_validator(mode="after")
    def _device_is_known(self) -> EngineConfig:
        kind, _, index = self.device.partition(":")
        if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
            raise ValueError(f"device={self.device!r} is not served; allowed: cpu, cuda, cuda:N")
        return self
