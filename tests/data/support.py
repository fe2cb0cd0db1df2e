"""Tokenizers, models and records that several data tests share; all made on the spot."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from zen_train.data.records import Message, Record, ask
from zen_train.data.token_set import TokenisedSet
from zen_train.data.tokenise import IGNORE, Counts, Example, tokenise_all
from zen_train.tiny import CHAT_TEMPLATE, tiny_tokenizer

VOCABULARY = 260
SYSTEM_DEFAULT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "<|im_start|>system\nBe helpful<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As in SmolLM2: no `{% generation %}` marks, and a system message of its own when the chat has none."""


def byte_tokenizer(template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE that joins a newline with the spaces after it, as GPT-2's and SmolLM2's do."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    text = ["user\n    return value\n    return other\nassistant\n    return value\n"] * 20
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(text, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def chat(*turns: tuple[str, str], document: str = "chat", origin: str = "") -> Record:
    return Record(document=document, messages=tuple(Message(r, c) for r, c in turns), origin=origin)


def sums(count: int, first: int = 0) -> list[Record]:
    """Small sums of unequal length."""
    return [
        ask(
            f"sum {i}",
            f"What is {i} plus {i % 7}?" + " Please." * (i % 5),
            f"It is {i + i % 7}" + "." * (i % 11),
        )
        for i in range(first, first + count)
    ]


def scored(example: Example, tokenizer: PreTrainedTokenizerFast) -> str:
    """The text of the tokens that carry loss."""
    return tokenizer.decode(example.input_ids[example.labels != IGNORE])


def token_set(
    records: list[Record], tokenizer: PreTrainedTokenizerFast, max_tokens: int = 128
) -> TokenisedSet:
    counts = Counts()
    rows = tokenise_all(records, tokenizer, max_tokens=max_tokens, too_long="error", counts=counts)
    return TokenisedSet.from_examples(rows, counts)


def tiny_model(architecture: str, attention: str) -> PreTrainedModel:
    """A random model of two layers in float64, in which rounding does not hide a wrong mask."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {**shape, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 256}
    kinds = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**rope, attn_implementation=attention)),
        "mistral": lambda: MistralForCausalLM(
            MistralConfig(**rope, sliding_window=64, attn_implementation=attention)
        ),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**rope, attn_implementation=attention)),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=32,
                n_layer=2,
                n_head=4,
                n_positions=256,
                attn_implementation=attention,
            )
        ),
    }
    return kinds[architecture]().double().eval()
