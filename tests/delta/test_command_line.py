"""`python -m zen_train.delta`: output for people and programs, one clear message and exit code 2 for a
refusal.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zen_train.delta
from tests.delta.models import export, load, logits, make_pair
from zen_train.delta import DeltaArtifact, FolderSource, sidecars_in, write_artifact
from zen_train.delta.__main__ import main


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    pair = make_pair(folder)
    export(pair, folder / "delta", variant="coder")
    return folder, pair


def test_inspect_shows_base_sizes_and_worst_tensors(made, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    folder, _ = made
    assert main(["inspect", str(folder / "delta")]) == 0
    out = capsys.readouterr().out
    for text in (
        "coder, step 7",
        "tiny-base",
        "CC0-1.0",
        "smaller than bf16",
        "Largest relative errors",
        "sign",
        "dense",
    ):
        assert text in out
    assert main(["inspect", str(folder / "delta"), "--tensors"]) == 0
    everything = capsys.readouterr().out
    assert everything.count("_proj.weight") == 14
    assert "lm_head.weight" in everything


def test_inspect_prints_json_for_programs(made, capsys):
    folder, _ = made
    assert main(["inspect", str(folder / "delta"), "--json", "--tensors"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["variant"] == "coder"
    assert found["base"]["name"] == "tiny-base"
    assert found["bytes_total"] == sum(path.stat().st_size for path in (folder / "delta").iterdir())
    assert len(found["tensors"]) == sum(kind["tensors"] for kind in found["kinds"].values())
    assert found["kinds"]["sign"]["bytes"] == sum(t["bytes"] for t in found["tensors"] if t["kind"] == "sign")
    assert main(["inspect", str(folder / "delta"), "--json"]) == 0
    assert "tensors" not in json.loads(capsys.readouterr().out)


def test_verify_says_what_was_checked(made, capsys):
    folder, pair = made
    assert main(["verify", str(folder / "delta")]) == 0
    out = capsys.readouterr().out
    assert "is intact" in out
    assert "not checked, give --base DIR" in out
    assert main(["verify", str(folder / "delta"), "--base", str(pair.base), "--tuned", str(pair.tuned)]) == 0
    out = capsys.readouterr().out
    assert "every byte matches" in out
    assert "confirmed; relative error of the whole delta 0.5" in out
    assert main(["verify", str(folder / "delta"), "--base", str(pair.base), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verified"] is True
    assert found["base_checked"] is True
    assert found["figures_checked"] is False


def test_apply_writes_a_model_and_says_what_rounding_costs(made, capsys, tmp_path):
    folder, pair = made
    assert main(["apply", str(folder / "delta"), str(pair.base), str(tmp_path / "out")]) == 0
    captured = capsys.readouterr()
    assert "tensors as BF16" in captured.out
    assert "--dtype float32 keeps it exactly" in captured.err
    assert (
        main(["apply", str(folder / "delta"), str(pair.base), str(tmp_path / "exact"), "--dtype", "float32"])
        == 0
    )
    assert capsys.readouterr().err == ""
    assert torch.isfinite(logits(load(tmp_path / "exact"))).all()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"code": "directions"}),
        (["--code", "directions", "--bits", "2"], {"code": "directions", "direction_bits": 2.0}),
        (["--code", "signs"], {"along_weight": 8.0}),
        (["--code", "signs", "--along-weight", "1", "--planes", "2"], {"planes": 2}),
        (["--embedding", "dense"], {"code": "directions", "embedding": "dense"}),
    ],
)
def test_export_writes_what_the_writer_writes_for_the_same_settings(made, capsys, tmp_path, words, expected):
    """Whatever an option says comes out in the bytes, beside the tokenizer of the fine-tune."""
    _, pair = made
    assert main(["export", str(pair.tuned), str(tmp_path / "out"), "--base", str(pair.base), *words]) == 0
    assert "times smaller than bf16, verified" in capsys.readouterr().out
    artifact = DeltaArtifact.open(tmp_path / "out")
    written = write_artifact(
        tmp_path / "same",
        base=FolderSource(pair.base),
        tuned=FolderSource(pair.tuned),
        base_info=artifact.config.base,
        variant=pair.tuned.name,
        step=0,
        sidecars=sidecars_in(pair.tuned) or sidecars_in(pair.base),
        **expected,
    )
    assert artifact.content_hash == written.content_hash
    assert artifact.config.variant == pair.tuned.name


def test_export_refuses_what_another_code_has_and_leaves_an_older_artifact_alone(made, capsys, tmp_path):
    _, pair = made
    out = tmp_path / "out"
    command = ["export", str(pair.tuned), str(out), "--base", str(pair.base), "--code"]
    assert main([*command, "signs", "--variant", "mine"]) == 0
    before = DeltaArtifact.open(out).content_hash
    for words, message in (
        (["signs", "--bits", "2", "--overwrite"], "--planes N"),
        (["directions", "--along-weight", "4", "--overwrite"], "--code signs"),
        (["directions", "--planes", "2", "--overwrite"], "planes=1"),
        (["directions", "--bits", "-1", "--overwrite"], "more than 0"),
        (["signs", "--along-weight", "0.5", "--overwrite"], "1 (least squares) or more"),
        (["signs"], "exists"),
    ):
        capsys.readouterr()
        assert main([*command, *words]) == 2, words
        assert message in capsys.readouterr().err
    assert DeltaArtifact.open(out).content_hash == before
    assert DeltaArtifact.open(out).config.variant == "mine"


def test_refusal_is_one_message_and_exit_code_2(made, capsys, tmp_path):
    folder, pair = made
    for arguments, message in (
        (["inspect", str(tmp_path)], "it is no delta artifact"),
        (["verify", str(folder / "delta"), "--base", str(pair.tuned)], "another base"),
        (["verify", str(folder / "delta"), "--tuned", str(pair.tuned)], "give the base too"),
        (["apply", str(folder / "delta"), str(pair.base), str(pair.base)], "exists"),
        (
            ["apply", str(folder / "delta"), str(tmp_path / "absent"), str(tmp_path / "out")],
            "is not a folder",
        ),
    ):
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert message in captured.err
        assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [[], ["inspect"], ["apply", "a"], ["apply", "a", "b", "c", "--dtype", "int8"]]
)
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: python -m zen_train.delta" in capsys.readouterr().err


COMMANDS = dict.fromkeys(["inspect", "verify", "apply", "distill", "evaluate"], "DELTA") | {"export": "TUNED"}


@pytest.mark.parametrize(("command", "argument"), COMMANDS.items())
def test_every_command_explains_itself(command, argument, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f" {argument} " in capsys.readouterr().out


def test_module_runs_and_imports_nothing_heavy():
    """Start-up stays short: neither transformers nor Lightning, Hydra, W&B or pydantic is imported."""
    script = (
        "import sys, zen_train.delta.__main__ as m\n"
        "heavy = {'transformers', 'lightning', 'hydra', 'wandb', 'pydantic', 'safetensors', 'accelerate'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "sys.exit(m.main(['inspect', 'nowhere']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_package_imports_only_what_it_may():
    """architecture.md: deltas know no Lightning, Hydra, W&B, no training; nothing here starts a process
    group. The command line may call what stands above the package, imported when it is called.
    """
    allowed = {"zen_train", "numpy", "torch", "rich"} | set(sys.stdlib_module_names)
    for path in Path(zen_train.delta.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] in allowed, f"{path.name} imports {name}"
                assert not name.startswith(("torch.distributed", "pickle")), f"{path.name} imports {name}"
                if name.startswith("zen_train."):
                    ours = (
                        "zen_train.delta",
                        "zen_train.errors",
                        "zen_train.ordered",
                        "zen_train.kernels.common",
                    )
                    above = {
                        "evaluate_command.py": "zen_train.harness",
                        "distill_command.py": "zen_train.distill_artifact",
                    }
                    if path.name in above:  # where the command line hands over
                        ours = (*ours, above[path.name])
                    assert name.startswith(ours), f"{path.name} imports {name}"
