"""The bench end to end on the tiny base with a delta of it, and its intervals."""

from __future__ import annotations

import json
import random
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from zen_train.delta import BaseInfo, FolderSource, StateDictSource, write_artifact


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
    from bench_tasks import main

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


def test_answers_are_those_of_the_dense_models(runs, tiny_base):
    """Greedy, chat template and end token included, for base, delta and full fine-tune."""
    from tasks_answers import answering, full_model

    from zen_train.data.tokenise import prompt_text
    from zen_train.delta import DeltaArtifact, apply_delta

    prompts = ["What is one and one?", "Say no."]
    weights = runs / "full" / "math" / "full-0.0001" / "weights.safetensors"
    apply_delta(
        DeltaArtifact.open(runs / "variants" / "math"), tiny_base.folder, runs / "merged", dtype="float32"
    )
    with answering(tiny_base, dtype="fp32") as answerer:
        models = {"base": None, "delta": answerer.load(runs / "variants" / "math")}
        found = answerer.answers(models, prompts, max_tokens=12)
    with full_model(tiny_base, weights) as folder:
        with answering(tiny_base, dtype="fp32", folder=folder) as answerer:
            found |= answerer.answers({"full": None}, prompts, max_tokens=12)
        folders = {"base": tiny_base.folder, "delta": runs / "merged", "full": folder}
        tokenizer = tiny_base.tokenizer()
        for name, place in folders.items():
            model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
            for prompt, answer in zip(prompts, found[name], strict=True):
                ids = tokenizer(prompt_text(prompt, tokenizer), return_tensors="pt").input_ids
                made = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
                assert answer.text == tokenizer.decode(made, skip_special_tokens=True).strip()
    assert found["base"] != found["delta"]


def test_a_variant_that_was_not_exported_is_named(runs, monkeypatch, capsys):
    from bench_tasks import main

    monkeypatch.setattr(sys, "argv", ["bench_tasks.py", "--variants", str(runs / "variants"), "coder"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "no folder coder in it; export that variant first" in capsys.readouterr().err


def test_wilson_interval_has_its_known_values():
    from tasks_intervals import wilson

    assert wilson(0, 10) == pytest.approx((0.0, 27.75), abs=0.01)
    assert wilson(10, 10) == pytest.approx((72.25, 100.0), abs=0.01)
    assert wilson(81, 263) == pytest.approx((25.53, 36.62), abs=0.01)  # Newcombe 1998


def test_paired_interval_holds_the_true_difference_19_times_in_20():
    from tasks_intervals import paired

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
