"""`python -m zen_train.delta evaluate`: base and delta through lm-eval on tasks in a temporary folder, no network."""

from __future__ import annotations

import json
import math
import sys
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.delta.models import ARCHITECTURES, export, load, logits, make_pair
from zen_train.delta import (
    BaseInfo,
    DeltaArtifact,
    FolderSource,
    StateDictSource,
    apply_delta,
    write_artifact,
)
from zen_train.delta.__main__ import main
from zen_train.harness import applied_model

QUESTIONS = {"Is snow white?": "yes", "Is coal white?": "no", "Is milk white?": "yes", "Is tar white?": "no"}
CHOICES = ["yes", "no", "blue"]
CHOICE_TASK = """\
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{folder}/choice.jsonl"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["yes", "no", "blue"]
doc_to_target: answer
"""
TEXT_TASK = """\
task: tiny_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{folder}/text.jsonl"}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""


@pytest.fixture(scope="module")
def delta(tiny_base, tmp_path_factory):
    """A fine-tune that knows the answers, as a delta."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny_base.folder, dtype=torch.float32)
    tokenizer = tiny_base.tokenizer()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        for question, answer in QUESTIONS.items():
            ids = tokenizer(f"{question} {answer}", return_tensors="pt").input_ids
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("harness") / "delta"
    write_artifact(
        folder,
        base=FolderSource(tiny_base.folder),
        tuned=StateDictSource(dict(model.named_parameters())),
        base_info=BaseInfo.from_folder(tiny_base.folder, name="tiny"),
        variant="answers",
        step=150,
        planes=4,
    )
    return folder


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """The folder of two tasks; what the loader of examples caches lands there too."""
    lm_tasks = pytest.importorskip("lm_eval.tasks")
    # Looking through the thousands of tasks that lm-eval brings takes ten seconds.
    monkeypatch.setattr(lm_tasks, "TaskManager", partial(lm_tasks.TaskManager, include_defaults=False))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"question": question, "answer": answer} for question, answer in QUESTIONS.items()]
    (folder / "choice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"{question} {answer}"}) + "\n" for question, answer in QUESTIONS.items())
    )
    (folder / "choice.yaml").write_text(CHOICE_TASK.format(folder=folder))
    (folder / "text.yaml").write_text(TEXT_TASK.format(folder=folder))
    return folder


def evaluate(delta, base, tasks, out, *more) -> dict:
    words = ["evaluate", str(delta), "--base", str(base.folder), "--include-path", str(tasks)]
    assert main([*words, "--tasks", "tiny_choice,tiny_text", "--out", str(out), *more]) == 0
    return json.loads(out.read_text())


@torch.no_grad()
def logprob(model, tokenizer, context: str, text: str) -> float:
    """Log probability of `text` after `context` (empty: after the end token, as lm-eval starts a text)."""
    given = tokenizer(context).input_ids if context else [tokenizer.eos_token_id]
    ids = torch.tensor([given + tokenizer(text).input_ids])
    logprob_TN = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return float(logprob_TN.gather(1, ids[0, 1:, None])[len(given) - 1 :].sum())


def scores(folder, tokenizer) -> tuple[float, float]:
    """Accuracy and bits per byte, computed with transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    right = bits = length = 0.0
    for question, answer in QUESTIONS.items():
        best = max(CHOICES, key=lambda choice: logprob(model, tokenizer, question, f" {choice}"))
        right += best == answer
        bits -= logprob(model, tokenizer, "", f"{question} {answer}") / math.log(2)
        length += len(f"{question} {answer}".encode())
    return right / len(QUESTIONS), bits / length


def test_scores_of_base_and_delta_are_those_of_the_merged_model(delta, tiny_base, tasks, tmp_path, capsys):
    found = evaluate(delta, tiny_base, tasks, tmp_path / "results.json", "--with-base")
    apply_delta(DeltaArtifact.open(delta), tiny_base.folder, tmp_path / "merged", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(tiny_base.folder)
    for results, folder in (
        (found["results"], tmp_path / "merged"),
        (found["zen_delta"]["base_results"], tiny_base.folder),
    ):
        accuracy, bits_per_byte = scores(folder, tokenizer)
        assert results["tiny_choice"]["acc,none"] == accuracy
        assert results["tiny_text"]["bits_per_byte,none"] == pytest.approx(bits_per_byte, rel=1e-5)
    base = found["zen_delta"]["base_results"]
    assert found["results"]["tiny_choice"]["acc,none"] == 1.0 > base["tiny_choice"]["acc,none"]
    assert found["results"]["tiny_text"]["bits_per_byte,none"] < base["tiny_text"]["bits_per_byte,none"] / 4
    assert found["zen_delta"]["content_hash"] == DeltaArtifact.open(delta).content_hash
    out = capsys.readouterr().out
    assert "tiny_choice" in out
    assert "1.0000" in out


def test_limit_takes_that_many_examples(delta, tiny_base, tasks, tmp_path):
    found = evaluate(delta, tiny_base, tasks, tmp_path / "results.json", "-L", "3", "-b", "2")
    assert {counts["effective"] for counts in found["n-samples"].values()} == {3}
    assert found["zen_delta"]["base_results"] is None


def test_an_unknown_task_is_named(delta, tiny_base, tasks, capsys):
    words = ["evaluate", str(delta), "--base", str(tiny_base.folder), "--include-path", str(tasks)]
    assert main([*words, "--tasks", "tiny_choice,tiny_chioce"]) == 2
    message = capsys.readouterr().err
    assert "no task 'tiny_chioce'" in message
    assert "--include-path" in message


def test_a_task_without_its_examples_is_one_message(delta, tiny_base, tasks, capsys):
    (tasks / "choice.jsonl").unlink()
    words = ["evaluate", str(delta), "--base", str(tiny_base.folder), "--include-path", str(tasks)]
    assert main([*words, "--tasks", "tiny_choice"]) == 2
    assert "could not read the examples of tiny_choice" in capsys.readouterr().err


def test_without_lm_eval_the_error_names_the_extra(delta, tiny_base, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", str(delta), "--base", str(tiny_base.folder), "--tasks", "piqa"]) == 2
    assert "pip install 'zen-train[eval]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"), [(["--limit", "0"], "not possible"), (["--limit", "2.5"], "share between 0 and 1")]
)
def test_a_limit_that_means_nothing_is_refused(more, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", "delta", "--base", "base", "--tasks", "piqa", *more])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_folder_for_the_results_is_found_before_the_work(delta, tiny_base, tmp_path, capsys):
    words = ["evaluate", str(delta), "--base", str(tiny_base.folder), "--tasks", "piqa"]
    assert main([*words, "--out", str(tmp_path / "absent" / "results.json")]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_model_in_memory_is_the_one_that_apply_writes(architecture, dtype, tmp_path, monkeypatch):
    """Also where transformers stores parameters otherwise than the files do, as it does experts."""
    monkeypatch.setattr("zen_train.harness.AutoTokenizer.from_pretrained", lambda folder: None)  # it has none
    pair = make_pair(tmp_path, architecture)
    export(pair, tmp_path / "delta")
    artifact = DeltaArtifact.open(tmp_path / "delta")
    apply_delta(artifact, pair.base, tmp_path / "merged", dtype=dtype)
    model, _ = applied_model(artifact, pair.base, dtype)
    assert model.dtype == getattr(torch, dtype)
    assert torch.equal(logits(model.float().eval()), logits(load(tmp_path / "merged")))
