"""The bench end to end on the tiny base with a delta of it, and its intervals."""

from __future__ import annotations

import json
import random
import shutil
import sys
from dataclasses import replace

import bench_tasks
import pytest
import torch
from bench_tasks import main
from safetensors.torch import save_file
from tasks_answers import answering, full_model
from tasks_intervals import paired, wilson
from tasks_problems import Task
from transformers import AutoModelForCausalLM

from zen_train.data.tokenise import prompt_text
from zen_train.delta import (
    BaseInfo,
    DeltaArtifact,
    FolderSource,
    StateDictSource,
    apply_delta,
    write_artifact,
)


@pytest.fixture
def runs(tiny_base, tmp_path):
    """A delta of the tiny base, and the fine-tune it was made from as fidelity_runs.py keeps it."""
    model = AutoModelForCausalLM.from_pretrained(tiny_base.folder, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    weights = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    write_artifact(
        tmp_path / "variants" / "math",
        base=FolderSource(tiny_base.folder),
        tuned=StateDictSource(weights),
        base_info=BaseInfo.from_folder(tiny_base.folder, name="tiny"),
        variant="math",
        step=1,
        embedding="sign",
    )
    (tmp_path / "full" / "math" / "full-0.0001").mkdir(parents=True)
    save_file(weights, tmp_path / "full" / "math" / "full-0.0001" / "weights.safetensors")
    return tmp_path


def bench(monkeypatch, capsys, runs, *more) -> list[dict]:
    words = ["--variants", str(runs / "variants"), "--base", "tiny", "--out", str(runs / "out.jsonl"), *more]
    monkeypatch.setattr(sys, "argv", ["bench_tasks.py", *words, "math"])
    assert main() == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_base_delta_and_full_are_measured_once_and_found_again(runs, monkeypatch, capsys):
    first = bench(monkeypatch, capsys, runs, "--limit", "3")
    assert [line["case"] for line in first] == [
        "math/base exact match",
        "math/delta exact match",
        "math/delta over base",
    ]
    assert all(len(line["outcomes"]) == 3 for line in first[:2])
    assert all(low <= line["value"] <= high for line in first for low, high in [line["spread"]])
    assert bench(monkeypatch, capsys, runs, "--limit", "3") == []
    more = bench(monkeypatch, capsys, runs, "--limit", "3", "--full", str(runs / "full"))
    assert [line["case"] for line in more] == ["math/full-0.0001 exact match", "math/full-0.0001 over base"]
    assert [json.loads(line) for line in (runs / "out.jsonl").read_text().splitlines()] == first + more
    again = bench(monkeypatch, capsys, runs, "--limit", "2")
    assert len(again) == 3, "other problems are other figures"
    assert sorted(path.name for path in (runs / "full" / "math" / "full-0.0001").iterdir()) == [
        "weights.safetensors"
    ]


def dense_answers(folder, tokenizer, prompts, *, end_tokens, max_tokens=12) -> list[str]:
    """Greedy answers by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = tokenizer(prompt_text(prompt, tokenizer), return_tensors="pt").input_ids
        made = model.generate(ids, max_new_tokens=max_tokens, do_sample=False, eos_token_id=end_tokens)
        answers.append(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True).strip())
    return answers


@pytest.fixture
def folders(runs, tiny_base):
    """Folders of the three models, for transformers."""
    weights = runs / "full" / "math" / "full-0.0001" / "weights.safetensors"
    artifact = DeltaArtifact.open(runs / "variants" / "math")
    apply_delta(artifact, tiny_base.folder, runs / "merged", dtype="float32")
    with full_model(tiny_base, weights) as full:
        yield {"base": tiny_base.folder, "delta": runs / "merged", "full": full}


def test_answers_are_those_of_the_dense_models(runs, folders, tiny_base, tmp_path):
    """Greedy, in the chat template, ended by each end token that the base names."""
    tokenizer, prompts = tiny_base.tokenizer(), ["What is one and one?", "Say no."]
    [longest, _] = dense_answers(folders["delta"], tokenizer, prompts, end_tokens=[tokenizer.eos_token_id])
    ends = [tokenizer.eos_token_id, tokenizer(longest[len(longest) // 2 :]).input_ids[0]]
    copied = shutil.copytree(tiny_base.folder, tmp_path / "ends")
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    base = replace(tiny_base, folder=copied)
    with answering(base, dtype="fp32") as answerer:
        models = {"base": None, "delta": answerer.load(runs / "variants" / "math")}
        found = answerer.answers(models, prompts, max_tokens=12)
    with answering(base, dtype="fp32", folder=folders["full"]) as answerer:
        found |= answerer.answers({"full": None}, prompts, max_tokens=12)
    for name, folder in folders.items():
        dense = dense_answers(folder, tokenizer, prompts, end_tokens=ends)
        assert [answer.text for answer in found[name]] == dense, name
    assert len(found["delta"][0].text) < len(longest)
    assert not found["delta"][0].cut
    assert found["base"] != found["delta"]


def test_each_model_is_measured_with_its_own_weights(runs, folders, tiny_base, monkeypatch, capsys):
    tokenizer, prompts = tiny_base.tokenizer(), ["What is one and one?", "Say no.", "Say yes."]
    answers = {
        name: dense_answers(folder, tokenizer, prompts, end_tokens=[tokenizer.eos_token_id])
        for name, folder in folders.items()
    }
    assert answers["full"] != answers["delta"]
    for name in ("delta", "full"):
        task = Task(
            name="math",
            variant="math",
            metric="exact match",
            source=f"what {name} says",
            prompts=prompts,
            max_tokens=12,
            score=lambda texts, right=answers[name]: [a == b for a, b in zip(texts, right, strict=True)],
        )
        monkeypatch.setattr(bench_tasks, "task_of", lambda *_, task=task: task)
        lines = bench(monkeypatch, capsys, runs, "--full", str(runs / "full"))
        solved = {line["case"]: line["outcomes"] for line in lines if "outcomes" in line}
        case = "math/delta exact match" if name == "delta" else "math/full-0.0001 exact match"
        assert [each for each, outcomes in solved.items() if outcomes == "111"] == [case]


def test_a_variant_that_was_not_exported_is_named(runs, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_tasks.py", "--variants", str(runs / "variants"), "coder"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "no folder coder in it; export that variant first" in capsys.readouterr().err


def test_wilson_interval_has_its_known_values():
    assert wilson(0, 10) == pytest.approx((0.0, 27.75), abs=0.01)
    assert wilson(10, 10) == pytest.approx((72.25, 100.0), abs=0.01)
    assert wilson(81, 263) == pytest.approx((25.53, 36.62), abs=0.01)  # Newcombe 1998


def test_paired_interval_holds_the_true_difference_19_times_in_20():
    chooser, held, rounds = random.Random(0), 0, 1500
    for _ in range(rounds):
        before = [chooser.random() < 0.2 for _ in range(40)]
        after = [chooser.random() < (0.8 if solved else 0.1) for solved in before]  # 0.24 in all
        gain, (low, high) = paired(*("".join("01"[each] for each in some) for some in (before, after)))
        assert low <= gain <= high
        held += low <= 4.0 <= high
    assert 0.93 < held / rounds < 0.985
    gain, (low, high) = paired("00000000", "00000000")
    assert gain == 0.0
    assert low < -20 < 20 < high, "eight problems that nobody solves say little"
