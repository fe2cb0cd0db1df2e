"""From configuration to a corpus and a DataModule: where the data section meets the data code."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from zen_train.data.config import CorpusData, DataConfig, JsonlData, ParquetData, TextData, VariantConfig
from zen_train.data.corpora import build
from zen_train.data.module import TextDataModule
from zen_train.data.records import Corpus, Record, split_by_document
from zen_train.data.sources import Fields, read_jsonl, read_parquet, read_text


def load_corpus(data: DataConfig, variant: VariantConfig) -> Corpus:
    """The variant's own corpus (fetched when it is not cached), or the user's data.

    Raises:
        DataError: a file, row or package that cannot be used.
        ConfigError: the variant names a corpus that does not exist.
    """
    if isinstance(data, CorpusData):
        corpus = build(
            variant.corpus, sources=variant.sources, heldout_share=variant.heldout_share, seed=variant.seed
        )
        if data.limit_records is None:
            return corpus
        return Corpus(
            name=corpus.name, train=list(islice(corpus.train, data.limit_records)), heldout=corpus.heldout
        )
    records = _read(data, Path(data.path).expanduser())
    if data.heldout_path is not None:
        heldout = list(_read(data, Path(data.heldout_path).expanduser()))
        known = {record.document for record in heldout}
        return Corpus(name=data.path, train=[r for r in records if r.document not in known], heldout=heldout)
    return split_by_document(records, name=data.path, heldout_share=data.heldout_share, seed=data.split_seed)


def data_module(
    data: DataConfig,
    variant: VariantConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    accumulate: int,
    max_steps: int,
) -> TextDataModule:
    """The DataModule of a run; nothing is fetched or read before its `setup`."""
    return TextDataModule(
        partial(load_corpus, data, variant),
        tokenizer=tokenizer,
        context_tokens=data.context_tokens,
        batch_size=data.batch_size,
        accumulate=accumulate,
        max_steps=max_steps,
        eval_tokens=data.eval_tokens,
        seed=data.seed,
        too_long=data.too_long,
        cache=data.cache,
    )


def _read(data: JsonlData | ParquetData | TextData, path: Path) -> Iterator[Record]:
    if isinstance(data, TextData):
        return read_text(path, pattern=data.pattern)
    fields = Fields(
        messages=data.messages_field,
        role=data.role_field,
        content=data.content_field,
        prompt=data.prompt_field,
        completion=data.completion_field,
        system=data.system_field,
        text=data.text_field,
        document=data.document_field,
    )
    return read_jsonl(path, fields) if isinstance(data, JsonlData) else read_parquet(path, fields)
