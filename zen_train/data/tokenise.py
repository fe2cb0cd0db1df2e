"""Records to token ids and labels: only what the assistant says carries loss, its end-of-turn token included.

Chats go through the tokenizer's own template. Where an assistant turn lies in the rendered text is found by
rendering growing parts of the chat, so templates without `{% generation %}` marks work; a template whose
parts are not prefixes of the whole is refused. Texts train on every token and end with the end token.
It does not pack (`packing.py`), and it drops nothing silently: `TokenisedSet.counts` says what was cut.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from zen_train.data.records import Message, Record
from zen_train.errors import DataError

IGNORE = -100  # the label that cross-entropy skips
TooLong = Literal["error", "truncate", "skip", "split"]
TOO_LONG: tuple[TooLong, ...] = ("error", "truncate", "skip", "split")
FALLBACK_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n' }}"
    "{% else %}{{ 'Assistant: ' + message['content'] + eos_token + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
"""For tokenizers that have no chat template (GPT-2): `User: ...`, newline, `Assistant: ...`, end token."""

_BATCH_RECORDS = 2048
_log = logging.getLogger(__name__)
_Spans = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids and labels of one record (or of a piece of it), both `[T]`; label -100 carries no loss."""

    input_ids: np.ndarray
    labels: np.ndarray
    name: str

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass
class Counts:
    """What became of the records: how many were kept whole, and how many were too long and what was done."""

    records: int = 0
    truncated: int = 0
    skipped: int = 0
    split: int = 0
    longest_tokens: int = 0
    names: list[str] = field(default_factory=list)

    def note(self, what: Literal["truncated", "skipped", "split"], name: str) -> None:
        setattr(self, what, getattr(self, what) + 1)
        if len(self.names) < 3:
            self.names.append(name)

    def warn(self, *, max_tokens: int) -> None:
        """One line about the records that were longer than `max_tokens`; silent when there were none."""
        for what in ("truncated", "skipped", "split"):
            if number := getattr(self, what):
                _log.warning(
                    "%d of %d records are longer than %d tokens and were %s (data.too_long), for example %s; "
                    "the longest has %d tokens. A larger data.context_tokens keeps them whole.",
                    number, self.records, max_tokens, what, ", ".join(self.names), self.longest_tokens,
                )  # fmt: skip


def tokenise(
    record: Record, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int, too_long: TooLong = "error"
) -> list[Example]:
    """Token ids and labels of one record: one example, none (`skip`) or several (`split`).

    Raises:
        DataError: the record carries no loss at all, is too long under `error`, or the template is unusable.
    """
    return list(tokenise_all([record], tokenizer, max_tokens=max_tokens, too_long=too_long, counts=Counts()))


def tokenise_all(
    records: Sequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    too_long: TooLong,
    counts: Counts,
) -> Iterator[Example]:
    """`tokenise` for many records, in batches; `counts` is updated as examples come out."""
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} gives no character offsets, which masking needs; use a base whose "
            "folder has a tokenizer.json"
        )
    for start in range(0, len(records), _BATCH_RECORDS):
        for example in _tokenise_batch(records[start : start + _BATCH_RECORDS], tokenizer):
            yield from _fit(example, max_tokens=max_tokens, too_long=too_long, counts=counts)


def _tokenise_batch(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    chats = [r for r in records if r.messages is not None]
    texts = [r for r in records if r.text is not None]
    examples: dict[int, Example] = {}
    if texts:
        ids_of = tokenizer([r.text for r in texts], return_attention_mask=False)["input_ids"]
        for record, ids in zip(texts, ids_of, strict=True):
            examples[id(record)] = _text_example(record, ids, tokenizer)
    if chats:
        rendered, spans_of = _render(chats, tokenizer)
        encoded = tokenizer(
            rendered, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False
        )
        special = _special_ids(tokenizer)
        for i, record in enumerate(chats):
            ids = encoded["input_ids"][i]
            offsets = np.asarray(encoded["offset_mapping"][i], dtype=np.int64).reshape(-1, 2)
            if _straddles(offsets, spans_of[i]):
                ids, offsets = _in_segments(rendered[i], spans_of[i], tokenizer, whole=(ids, offsets))
            examples[id(record)] = _chat_example(record, ids, offsets, spans_of[i], special, tokenizer)
    return [examples[id(r)] for r in records]


def _text_example(record: Record, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> Example:
    if not ids:
        raise DataError(f"{record.name}: the text is empty")
    if tokenizer.eos_token_id is not None and ids[-1] != tokenizer.eos_token_id:
        ids = [*ids, tokenizer.eos_token_id]
    input_ids = np.asarray(ids, dtype=np.int32)
    return Example(input_ids, input_ids.copy(), record.name)


def _chat_example(
    record: Record,
    ids: list[int],
    offsets: np.ndarray,
    spans: _Spans,
    special: np.ndarray,
    tokenizer: PreTrainedTokenizerBase,
) -> Example:
    input_ids = np.asarray(ids, dtype=np.int32)
    labels = np.full_like(input_ids, IGNORE)
    begins, ends = offsets.T
    is_special = np.isin(input_ids, special)
    for number, (a, b) in enumerate(spans):
        inside = np.flatnonzero((ends > a) & (begins < b) & (ends > begins))
        end_of_turn = inside[is_special[inside]]
        if len(end_of_turn):
            # What a template writes after the end-of-turn token (a newline) is never generated.
            inside = inside[inside <= end_of_turn[-1]]
        labels[inside] = input_ids[inside]
        if not len(end_of_turn) and number == len(spans) - 1 and tokenizer.eos_token_id is not None:
            input_ids = np.append(input_ids, np.int32(tokenizer.eos_token_id))
            labels = np.append(labels, np.int32(tokenizer.eos_token_id))
    if not (labels[1:] != IGNORE).any():
        raise DataError(
            f"{record.name}: nothing in this record carries loss, because it has no assistant text; give it "
            "an assistant message (or a completion) that is not empty"
        )
    return Example(input_ids, labels, record.name)


def _fit(example: Example, *, max_tokens: int, too_long: TooLong, counts: Counts) -> Iterator[Example]:
    counts.records += 1
    counts.longest_tokens = max(counts.longest_tokens, len(example))
    if len(example) <= max_tokens:
        yield example
        return
    size = f"{example.name}: {len(example)} tokens, longer than data.context_tokens={max_tokens}"
    if too_long == "error":
        raise DataError(
            f"{size}. Raise data.context_tokens, or set data.too_long to truncate, skip or split."
        )
    if too_long == "skip":
        counts.note("skipped", example.name)
        return
    stop = max_tokens if too_long == "truncate" else len(example)
    pieces = [
        Example(example.input_ids[i : i + max_tokens], example.labels[i : i + max_tokens], example.name)
        for i in range(0, stop, max_tokens)
    ]
    pieces = [piece for piece in pieces if (piece.labels[1:] != IGNORE).any()]
    if not pieces:
        raise DataError(
            f"{size}, and cut to that length no assistant text is left. Raise data.context_tokens."
        )
    counts.note("truncated" if too_long == "truncate" else "split", example.name)
    yield from pieces


def prompt_text(prompt: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """`prompt` as one user turn, rendered up to where the assistant begins: what a model continues."""
    template = tokenizer.chat_template or FALLBACK_TEMPLATE
    record = Record(document="prompt", messages=(Message("user", prompt),))
    return _apply(tokenizer, template, [[{"role": "user", "content": prompt}]], [record], generation=True)[0]


# --- where the assistant speaks ---------------------------------------------------------------------------


def _render(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[_Spans]]:
    """The rendered chats, and for each the character spans of the assistant turns."""
    template = tokenizer.chat_template or FALLBACK_TEMPLATE
    chats = [[{"role": m.role, "content": m.content} for m in r.messages or ()] for r in records]
    wholes = _apply(tokenizer, template, chats, records, generation=False)
    wanted = [(i, k) for i, chat in enumerate(chats) for k, m in enumerate(chat) if m["role"] == "assistant"]
    opened = _apply(
        tokenizer,
        template,
        [chats[i][:k] for i, k in wanted],
        [records[i] for i, _ in wanted],
        generation=True,
    )
    inner = [(i, k) for i, k in wanted if k + 1 < len(chats[i])]
    closed = dict(
        zip(
            inner,
            _apply(
                tokenizer, template, [chats[i][: k + 1] for i, k in inner], [records[i] for i, _ in inner],
                generation=False,
            ),
            strict=True,
        )
    )  # fmt: skip
    spans: list[_Spans] = [[] for _ in chats]
    for (i, k), before in zip(wanted, opened, strict=True):
        through = closed.get((i, k), wholes[i])
        if not (wholes[i].startswith(through) and through.startswith(before)):
            raise DataError(
                f"{records[i].name}: the chat template of this tokenizer renders the start of a chat "
                f"differently once message {k + 1} or a later one is added, so it cannot be told which "
                "tokens the assistant says. Use chats with one assistant turn, or a tokenizer whose "
                "template only appends."
            )
        spans[i].append((len(before), len(through)))
    return wholes, spans


def _apply(
    tokenizer: PreTrainedTokenizerBase,
    template: str | dict[str, Any],
    chats: list[list[dict[str, str]]],
    records: Sequence[Record],
    *,
    generation: bool,
) -> list[str]:
    if not chats:
        return []
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": generation}
    if isinstance(template, str):
        options["chat_template"] = template
    try:
        return cast(list[str], tokenizer.apply_chat_template(chats, **options))
    except Exception as error:
        # A template is a program from the base's folder and may raise anything; find the record it fails on.
        for chat, record in zip(chats, records, strict=True):
            try:
                tokenizer.apply_chat_template(chat, **options)
            except Exception as own:
                roles = ", ".join(m["role"] for m in chat) or "none"
                raise DataError(
                    f"{record.name}: the chat template refuses this chat (roles: {roles}): {own}"
                ) from own
        raise DataError(f"the chat template of this tokenizer fails: {error}") from error


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    added = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    return np.asarray(sorted({*added, *tokenizer.all_special_ids}), dtype=np.int64)


def _straddles(offsets: np.ndarray, spans: _Spans) -> bool:
    begins, ends = offsets.T
    return any(bool(((begins < a) & (a < ends)).any()) for a, _ in spans)


def _in_segments(
    text: str, spans: _Spans, tokenizer: PreTrainedTokenizerBase, *, whole: tuple[list[int], np.ndarray]
) -> tuple[list[int], np.ndarray]:
    """Tokenise prompt and answer apart, as generation does: there the prompt's last token is already fixed.

    A byte-level tokenizer may join the template's last newline with the answer's own indentation. Tokenizers
    that put a space before every piece (SentencePiece) would gain tokens this way; for those the whole-text
    tokens are kept, and a token on the border counts as the assistant's.
    """
    cuts = [0, *(a for a, _ in spans), len(text)]
    ids: list[int] = []
    offsets: list[np.ndarray] = []
    for a, b in pairwise(cuts):
        part = tokenizer(text[a:b], add_special_tokens=False, return_offsets_mapping=True)
        ids += part["input_ids"]
        offsets.append(np.asarray(part["offset_mapping"], dtype=np.int64).reshape(-1, 2) + a)
    if tokenizer.decode(ids) == tokenizer.decode(whole[0]):
        return ids, np.concatenate(offsets)
    return whole
