"""The bodies of requests, with bounds. What is not here is refused by name; so is what this server cannot honour.

Fields that OpenAI's clients send and that change nothing here (`user`, `metadata`, ...) are taken and ignored. Fields
for features that are not offered (`tools`, `response_format`, ...) may hold their neutral value only. `top_k`, `min_p`,
`repetition_penalty`, `ignore_eos`, `min_tokens` and `stop_token_ids` are vLLM's extensions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_INT64 = 2**63 - 1
MAX_STOPS = 16
MAX_CHOICES = 128

Count = Annotated[int, Field(ge=1, le=_INT64)]
TokenId = Annotated[int, Field(ge=0, le=_INT64)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
ModelName = Annotated[str, Field(min_length=1, max_length=512)]
# One error is enough: a million wrong elements must not make a million error records.
Tokens = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Nothing = Annotated[list[Any], Field(max_length=0)] | None


class Body(BaseModel):
    """A JSON object. Unknown fields and wrong types are errors: "1" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="ignored: nothing is obfuscated")


class TextFormat(Body):
    """The only response format that is offered."""

    type: Literal["text"]


class Generation(Body):
    """What completions and chat completions share."""

    model: ModelName
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT64)] | None = Field(None, description="-1 or 0: all tokens")
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None
    ) = None
    seed: Annotated[int, Field(ge=-_INT64 - 1, le=_INT64)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_INT64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    user: str | None = Field(None, description="ignored")
    metadata: dict[str, Any] | None = Field(None, description="ignored")
    safety_identifier: str | None = Field(None, description="ignored")
    prompt_cache_key: str | None = Field(None, description="ignored: caches are kept apart by variant")
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None


class CompletionRequest(Generation):
    """`POST /v1/completions`."""

    prompt: str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None


class TextPart(Body):
    """A part of a message. Only text is understood."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation. What else an assistant's message carries in OpenAI's form must be empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = Field(None, description="ignored")
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Nothing = None
    annotations: Nothing = None

    def text(self) -> str:
        """The content, parts joined."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Generation):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)]
    max_completion_tokens: Count | None = Field(None, description="the newer name of max_tokens")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: TextFormat | None = None
    tools: Nothing = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = Field(None, description="ignored")
    functions: Nothing = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None


class LoadRequest(Body):
    """`POST /v1/load_lora_adapter`, as vLLM names it."""

    lora_name: ModelName
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool | None = Field(None, description="true: replace the variant of that name")


class UnloadRequest(Body):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: ModelName
    lora_int_id: int | None = Field(None, description="ignored")


class PinRequest(Body):
    """`POST /v1/pin` and `POST /v1/unpin`."""

    model: ModelName


NOT_OFFERED = {
    "service_tier": "there is one tier",
    "store": "nothing is stored",
    "suffix": "text is only continued, never filled in",
    "best_of": "use n",
    "response_format": "answers are plain text",
    "tools": "tool calls are not offered",
    "tool_choice": "tool calls are not offered",
    "functions": "tool calls are not offered",
    "function_call": "tool calls are not offered",
    "tool_calls": "tool calls are not offered",
    "annotations": "tool calls are not offered",
    "modalities": "answers are plain text",
    "audio": "answers are plain text",
    "prediction": "predicted outputs are not offered",
    "web_search_options": "the model does not search",
    "reasoning_effort": "the model has no such setting",
    "verbosity": "the model has no such setting",
    "refusal": "only text is understood",
}
"""Fields that are known and refused unless neutral, with the reason given to the caller."""
