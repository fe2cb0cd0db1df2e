"""`python -m zen_train` as a user runs it: real processes, on the tiny base and a small file of their own."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from zen_train.delta import DeltaArtifact, verify_artifact

TWO_PROCESSES = ["trainer.strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu"]


@pytest.fixture
def data_file(tmp_path):
    path = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"What is {n} plus 1?", "completion": f"It is {n + 1}."} for n in range(80)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def zen_train(*words, cwd, **environment):
    return subprocess.run(
        [sys.executable, "-m", "zen_train", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def tiny(data_file, *more):
    rule = [] if any(word.startswith("merge=") for word in more) else ["merge=svd_average"]
    return [
        "+variant=chat", "base=tiny", "data=jsonl", f"data.path={data_file}", "data.context_tokens=64",
        "data.eval_tokens=256", "trainer.max_steps=6", *rule, "merge.every_n_steps=2", "merge.rank=4", *more,
    ]  # fmt: skip


def test_a_run_leaves_everything_that_was_promised(data_file, tmp_path, tiny_base):
    done = zen_train(*tiny(data_file), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "outputs" / "chat"
    metrics = json.loads((folder / "metrics.json").read_text())["results"]
    losses = metrics["losses"]
    assert losses["fine_tune"] < losses["base"]
    assert losses["delta"] < losses["base"]
    assert [merge["step"] for merge in metrics["curves"]["merges"]] == [4, 6]
    assert yaml.safe_load((folder / "config.yaml").read_text())["merge"]["rank"] == 4
    steps = [line.split(",")[0] for line in (folder / "curves.csv").read_text().splitlines()[1:]]
    assert steps == [str(step) for step in range(1, 7)]
    assert "<svg" in (folder / "report.html").read_text()
    assert (folder / "report.png").stat().st_size > 10_000
    verify_artifact(folder / "delta", base=tiny_base.source(), tuned=None)
    assert DeltaArtifact.open(folder / "delta").config.step == 6
    assert f"{losses['delta']:.4f}" in (folder / "delta" / "README.md").read_text()
    assert f"{losses['delta']:.4f}" in done.stdout


def test_without_a_key_the_run_is_tracked_offline_and_names_the_folder(data_file, tmp_path):
    """unsloth #1914, LMFlow #65: no prompt, no crash."""
    home = tmp_path / "home"
    home.mkdir()
    cache = {"ZEN_TRAIN_CACHE": str(tmp_path / "cache")}
    done = zen_train(*tiny(data_file), cwd=tmp_path, WANDB_MODE="", WANDB_API_KEY="", HOME=str(home), **cache)
    assert done.returncode == 0, done.stderr
    assert "wandb sync" in done.stdout
    assert list((tmp_path / "outputs" / "chat" / "wandb").glob("offline-run-*"))


def test_an_existing_output_folder_is_refused_and_untouched(data_file, tmp_path):
    folder = tmp_path / "outputs" / "chat"
    folder.mkdir(parents=True)
    (folder / "precious.txt").write_text("mine")
    for words, hint in [([], "resume=auto"), (["overwrite=true"], "no zen_train run made")]:
        done = zen_train(*tiny(data_file, *words), cwd=tmp_path)
        assert done.returncode == 2
        assert hint in done.stderr
        assert "Traceback" not in done.stderr
    assert [path.name for path in folder.iterdir()] == ["precious.txt"]


def test_a_refused_run_leaves_no_folder_behind(tmp_path):
    done = zen_train(*tiny(tmp_path / "missing.jsonl"), cwd=tmp_path)
    assert done.returncode == 2
    assert "missing.jsonl" in done.stderr
    assert not (tmp_path / "outputs").exists()


def test_a_malformed_line_is_named_by_its_number(data_file, tmp_path):
    with data_file.open("a") as file:
        file.write('{"prompt": "half\n')
    done = zen_train(*tiny(data_file), cwd=tmp_path)
    assert done.returncode == 2
    assert "sums.jsonl:81" in done.stderr


def test_a_merge_interval_longer_than_the_run_is_a_warning(data_file, tmp_path):
    done = zen_train(*tiny(data_file, "merge.every_n_steps=1000", "trainer.max_steps=2"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "merge.every_n_steps=1000 is longer than the run" in " ".join(done.stdout.split())


def test_a_diverging_run_stops_with_the_step_and_the_records(data_file, tmp_path):
    words = tiny(data_file, "optim.learning_rate=0.99", "optim.clip_norm=null", "optim.warmup_steps=0",
                 "trainer.max_steps=400", "merge.every_n_steps=1", "trainer.precision=32-true",
                 "optim.weight_decay=1000000000")  # fmt: skip
    done = zen_train(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert "at optimizer step" in done.stderr
    assert "sums.jsonl:" in done.stderr or "gradient norm" in done.stderr
    assert not (tmp_path / "outputs" / "chat" / "delta").exists()


@pytest.mark.parametrize("strategy", [[], TWO_PROCESSES], ids=["one process", "two"])
def test_ctrl_c_leaves_a_checkpoint_that_the_printed_command_resumes(data_file, tmp_path, strategy):
    words = tiny(
        data_file, "trainer.max_steps=4000", "merge.every_n_steps=50", "merge.accept=always", *strategy
    )
    folder = tmp_path / "outputs" / "chat"
    with subprocess.Popen(
        [sys.executable, "-m", "zen_train", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + 120
        while not (folder / "checkpoints" / "last.ckpt").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes of the run
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert printed.count("resume=auto") == 1
    assert "hydra" not in printed  # Lightning adds such words to the command of the second process
    stopped_at = int(printed.split("stopped after optimizer step ")[1].split(".")[0])
    again = zen_train(
        *[word for word in words if not word.startswith("trainer.max_steps")],
        f"trainer.max_steps={stopped_at + 5}",
        "resume=auto",
        cwd=tmp_path,
    )
    assert again.returncode == 0, again.stderr
    steps = [int(line.split(",")[0]) for line in (folder / "curves.csv").read_text().splitlines()[1:]]
    assert steps == list(range(1, stopped_at + 6))


def test_a_full_disk_stops_the_run_and_keeps_the_last_checkpoint(data_file, tmp_path):
    """Files may grow to 300 kB after the first checkpoint, which is larger: as a disk that fills up during the run."""
    first = zen_train(*tiny(data_file, "trainer.max_steps=2", "evaluate.enabled=false"), cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    checkpoint = tmp_path / "outputs" / "chat" / "checkpoints" / "last.ckpt"
    before = checkpoint.read_bytes()
    full = f"""
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
sys.argv = ["zen_train", *{tiny(data_file, "trainer.max_steps=40", "resume=auto", "merge=none")!r}]
runpy.run_module("zen_train", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", full],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 2, done.stderr
    assert "could not be written" in done.stderr
    assert "Free space" in done.stderr
    assert checkpoint.read_bytes() == before
    assert not list(checkpoint.parent.glob(".*"))


def test_resuming_a_finished_run_says_so(data_file, tmp_path):
    assert zen_train(*tiny(data_file), cwd=tmp_path).returncode == 0
    again = zen_train(*tiny(data_file), "resume=auto", cwd=tmp_path)
    assert again.returncode == 2
    assert "has already done all" in again.stderr


def test_a_sweep_runs_one_variant_after_another(data_file, tmp_path):
    done = zen_train("-m", *tiny(data_file)[1:], "+variant=chat,math", "trainer.max_steps=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / "outputs" / name / "delta").is_dir() for name in ("chat", "math"))


def test_two_processes_train_one_run(data_file, tmp_path):
    done = zen_train(*tiny(data_file, *TWO_PROCESSES), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "outputs" / "chat"
    assert json.loads((folder / "metrics.json").read_text())["results"]["steps"] == 6
    steps = [line.split(",")[0] for line in (folder / "curves.csv").read_text().splitlines()[1:]]
    assert steps == [str(step) for step in range(1, 7)]
    assert done.stdout.count("loss per token") == 1


AT_EXIT = """
import atexit, gc, os, pathlib, sys

def tell():
    if (torch := sys.modules.get("torch")) and "lightning" in sys.modules:
        left = sum(isinstance(found, torch.nn.Parameter) for found in gc.get_objects())
        group = torch.distributed.is_initialized()
        pathlib.Path(os.environ["TELL_FOLDER"], f"{os.getpid()}.txt").write_text(f"{left} parameters, group {group}")

atexit.register(tell)
"""


def test_each_of_two_processes_leaves_the_group_before_it_ends(data_file, tmp_path):
    """pytorch #190489: gloo's threads abort a process whose tensors they free while its interpreter ends."""
    told = tmp_path / "told"
    told.mkdir()
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    done = zen_train(
        *tiny(data_file, *TWO_PROCESSES),
        cwd=tmp_path,
        PYTHONPATH=str(tmp_path),
        TELL_FOLDER=str(told),
    )
    assert done.returncode == 0, done.stderr
    assert [path.read_text() for path in told.iterdir()] == ["0 parameters, group False"] * 2


@pytest.mark.parametrize(("word", "expected"), [("--variants", "botocore"), ("--help", "scale=full")])
def test_the_helps_need_no_model(tmp_path, word, expected):
    done = zen_train(word, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
