"""Tokenizers: shared by content, loaded once, off the event loop when a prompt is long."""

import asyncio
import json
import threading

import pytest

from tests.serve.api.stage import END, TOKENIZER
from zen_train.serve.api.text import TextModel, TextModels
from zen_train.serve.errors import BadRequestError, VariantUnusableError


@pytest.fixture
def folder(tmp_path):
    def make(name: str):
        TOKENIZER.save_pretrained(tmp_path / name)
        return tmp_path / name

    return make


def run(work):
    """`work(models)` on a loop of its own."""

    async def whole():
        models = TextModels()
        try:
            return await work(models)
        finally:
            models.close()

    return asyncio.run(whole())


def test_folders_with_equal_files_share_one_tokenizer_and_others_do_not(folder):
    a, b, c = folder("a"), folder("b"), folder("c")
    (c / "chat_template.jinja").write_text("other")

    async def work(models):
        return [await models.get(path, path.name) for path in (a, b, c, a)]

    first, second, third, again = run(work)
    assert first is second is again
    assert third is not first


def test_many_requests_for_one_folder_load_it_once(folder, monkeypatch):
    path, made = folder("a"), []
    whole = TextModel.__init__
    monkeypatch.setattr(
        TextModel, "__init__", lambda self, folder: (made.append(folder), whole(self, folder))[1]
    )

    async def work(models):
        return await asyncio.gather(*(models.get(path, "hash") for _ in range(16)))

    assert len(set(run(work))) == 1
    assert made == [path]


def test_new_weights_in_the_same_folder_bring_their_own_template(folder):
    path = folder("a")

    async def work(models):
        before = await models.get(path, "old")
        (path / "chat_template.jinja").write_text("NEW")
        return before, await models.get(path, "new"), await models.get(path, "old")

    before, after, old = run(work)
    assert after.render_chat([{"role": "user", "content": "x"}]) == "NEW"
    assert old is before


def test_a_long_prompt_is_encoded_in_another_thread_and_equals_a_short_ones_way(folder, monkeypatch):
    path, threads = folder("a"), []
    encode = TextModel.encode
    monkeypatch.setattr(
        TextModel,
        "encode",
        lambda self, text: (threads.append(threading.current_thread()), encode(self, text))[1],
    )

    async def work(models):
        model = await models.get(path, "hash")
        return await models.encode(model, "x" * 100_000), await models.encode(model, "x")

    long, short = run(work)
    assert long == short * 100_000
    assert threads[0] is not threading.main_thread()
    assert threads[1] is threading.main_thread()


def test_missing_or_damaged_files_are_the_variants_fault(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    torn = folder("torn")
    (torn / "tokenizer.json").write_text("{")
    for path in (tmp_path / "empty", torn, tmp_path / "absent"):
        with pytest.raises(VariantUnusableError, match=path.name):
            run(lambda models, path=path: models.get(path, "hash"))


def test_end_tokens_come_from_both_files(folder):
    path = folder("a")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert TextModel(path).end_tokens == {END, 3, 4}
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert TextModel(path).end_tokens == {END, 5}


def test_a_model_without_a_template_takes_no_chat(folder):
    path = folder("a")
    (path / "chat_template.jinja").unlink()
    with pytest.raises(BadRequestError) as caught:
        TextModel(path).render_chat([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_a_template_cannot_reach_the_system(folder):
    path = folder("a")
    (path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(BadRequestError):
        TextModel(path).render_chat([{"role": "user", "content": "x"}])
