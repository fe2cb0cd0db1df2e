"""The real base with variants of it: outputs equal the dense models, with the shapes that are really served."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.serve.engine.models import Family, assert_equals_dense, engine_of, job, load, load_dense, run
from zen_train.delta import BaseInfo, FolderSource, StateDictSource, write_artifact

pytestmark = pytest.mark.real
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "A customer writes that the parcel did not arrive. Answer politely:",
    "Water boils at",
)


def export_variant(base, folder, *, seed):
    """Move every parameter by a tenth of its spread: about what a short fine-tune does."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            step = torch.randn(parameter.shape, generator=generator) * parameter.std() * 0.1
            parameter.add_(step)
    write_artifact(
        folder,
        base=FolderSource(base),
        tuned=StateDictSource(dict(model.named_parameters())),
        base_info=BaseInfo.from_folder(base, name="smollm2"),
        variant=folder.name,
        step=1,
        embedding="sign",
    )
    return folder


@pytest.fixture(scope="module")
def real_family(real_base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    return Family(
        real_base, {name: export_variant(real_base, folder / name, seed=ord(name)) for name in ("a", "b")}
    )


def test_a_mixed_batch_of_the_real_base_equals_the_dense_models(real_family):
    tokenizer = AutoTokenizer.from_pretrained(real_family.base)
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in PROMPTS]
    engine = engine_of(
        real_family, threads=2, slots=2, kv_bytes=64 << 20, page_tokens=16, context_tokens=256, max_jobs=12
    )
    try:
        load(engine, real_family, ["a", "b"])
        works = {
            name: [
                job(f"{name}-{number}", real_family.hash(name) if name else None, tokens, max_tokens=16)
                for number, tokens in enumerate(prompts)
            ]
            for name in (None, "a", "b")
        }
        done = run(engine, *(work for some in works.values() for work in some))
        for name, some in works.items():
            dense = real_family.dense(name)
            for work in some:
                assert_equals_dense(dense, work, done.events[work.id])
            load_dense.cache_clear()  # half a gigabyte each
        outputs = {name: [done.tokens(work.id) for work in some] for name, some in works.items()}
        assert outputs[None] != outputs["a"] != outputs["b"]
    finally:
        engine.stop()
