"""Curves as CSV and W&B: nothing here may prompt, hang or stop a run."""

import csv
import json
import os
import pty
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from pydantic import ValidationError

from zen_train.errors import OutputError
from zen_train.tracking import (
    LoggerConfig,
    WandbConfig,
    WandbDecision,
    finish_loggers,
    log_artifact,
    make_loggers,
    resolve_wandb,
)
from zen_train.tracking.csv_logger import CurvesLogger

REPOSITORY = Path(__file__).parents[1]
FAKE_KEY = "0" * 40
OFFLINE = WandbDecision(mode="offline", reason="test")


def rows_of(folder):
    with (folder / "curves.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def log_steps(logger, steps, **more):
    for step in steps:
        logger.log_metrics({"train/loss": 1.0 / step, **more}, step=step)


@pytest.fixture
def closed_port():
    """A port of this machine on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def silent_port():
    """A port of this machine that accepts connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        accepted = []
        threading.Thread(target=_accept, args=(server, accepted), daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    for connection in accepted:
        connection.close()


def _accept(server, accepted):
    while True:
        try:
            accepted.append(server.accept()[0])
        except OSError:
            return


def run_script(script, folder, *, stdin=subprocess.DEVNULL, timeout_s=120, **env):
    """Run Python code in a fresh process that has no key and an empty home."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder / "run")],
        env={"PATH": os.environ["PATH"], "HOME": str(home), "OMP_NUM_THREADS": "1", **env},
        cwd=REPOSITORY,
        stdin=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done, time.monotonic() - started


# --- the decision


@pytest.mark.parametrize(
    ("mode", "env", "expected"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_MODE": "offline", "WANDB_API_KEY": FAKE_KEY}, "offline"),
        ("auto", {"WANDB_MODE": "dryrun"}, "offline"),
        ("auto", {"WANDB_MODE": "disabled", "WANDB_API_KEY": FAKE_KEY}, "disabled"),
        ("auto", {"WANDB_DISABLED": "true", "WANDB_API_KEY": FAKE_KEY}, "disabled"),
        ("auto", {"WANDB_MODE": "online"}, "offline"),
        ("auto", {"WANDB_MODE": "sideways", "WANDB_API_KEY": FAKE_KEY}, "offline"),
        ("online", {}, "offline"),
        ("offline", {"WANDB_MODE": "online", "WANDB_API_KEY": FAKE_KEY}, "offline"),
        ("disabled", {"WANDB_MODE": "online", "WANDB_API_KEY": FAKE_KEY}, "disabled"),
    ],
)
def test_mode_follows_the_setting_then_the_environment_then_the_key(tmp_path, mode, env, expected):
    decision = resolve_wandb(WandbConfig(mode=mode), env={"HOME": str(tmp_path), **env})
    assert decision.mode == expected
    assert decision.reason


def test_offline_says_how_to_upload_later(tmp_path):
    decision = resolve_wandb(WandbConfig(), env={"HOME": str(tmp_path)}, run_folder="outputs/coder")
    assert "no API key" in decision.line()
    assert "wandb sync outputs/coder/wandb/offline-run-*" in decision.line()


def test_a_key_and_a_server_that_listens_give_online(tmp_path, silent_port):
    env = {"HOME": str(tmp_path), "WANDB_BASE_URL": f"http://127.0.0.1:{silent_port}"}
    assert resolve_wandb(WandbConfig(), env={**env, "WANDB_API_KEY": FAKE_KEY}).mode == "online"
    netrc = tmp_path / ".netrc"
    netrc.write_text(f"machine 127.0.0.1:{silent_port}\n  login user\n  password {FAKE_KEY}\n")
    decision = resolve_wandb(WandbConfig(), env=env)
    assert decision.mode == "online"
    assert FAKE_KEY not in decision.line()


def test_a_broken_netrc_is_no_key(tmp_path):
    (tmp_path / ".netrc").write_text("machine\nmachine machine {{{")
    assert resolve_wandb(WandbConfig(), env={"HOME": str(tmp_path)}).mode == "offline"


def test_a_closed_port_falls_back_to_offline_at_once(tmp_path, closed_port):
    server = f"http://127.0.0.1:{closed_port}"
    started = time.monotonic()
    decision = resolve_wandb(
        WandbConfig(), env={"HOME": str(tmp_path), "WANDB_API_KEY": FAKE_KEY, "WANDB_BASE_URL": server}
    )
    assert time.monotonic() - started < 3
    assert decision.mode == "offline"
    assert server in decision.reason
    assert "wandb sync" in decision.hint


def test_a_proxy_is_probed_instead_of_the_server_behind_it(tmp_path, silent_port, closed_port):
    env = {
        "HOME": str(tmp_path),
        "WANDB_API_KEY": FAKE_KEY,
        "WANDB_BASE_URL": f"http://127.0.0.1:{closed_port}",
    }
    assert (
        resolve_wandb(WandbConfig(), env={**env, "http_proxy": f"127.0.0.1:{silent_port}"}).mode == "online"
    )
    bypassed = {**env, "http_proxy": f"127.0.0.1:{silent_port}", "no_proxy": "127.0.0.1"}
    assert resolve_wandb(WandbConfig(), env=bypassed).mode == "offline"


@pytest.mark.parametrize("server", ["http://127.0.0.1:notaport", "nonsense", "http://"])
def test_a_server_address_that_is_wrong_falls_back_to_offline(tmp_path, server):
    env = {"HOME": str(tmp_path), "WANDB_API_KEY": FAKE_KEY, "WANDB_BASE_URL": server}
    assert resolve_wandb(WandbConfig(connect_timeout_s=2), env=env).mode == "offline"


def test_an_unknown_setting_is_refused_and_the_default_file_is_the_schema():
    yaml = pytest.importorskip("yaml")
    with pytest.raises(ValidationError, match="projekt"):
        LoggerConfig.model_validate({"wandb": {"projekt": "x"}})
    with pytest.raises(ValidationError, match="mode"):
        LoggerConfig.model_validate({"wandb": {"mode": "maybe"}})
    written = yaml.safe_load((REPOSITORY / "conf" / "logger" / "default.yaml").read_text())
    assert LoggerConfig.model_validate(written) == LoggerConfig()


# --- the CSV


def test_figures_of_one_step_share_a_row_and_late_columns_are_added(tmp_path):
    logger = CurvesLogger(tmp_path, flush_every_n_rows=2)
    log_steps(logger, range(1, 8))
    logger.log_metrics({"val/loss": 2.0, "epoch": 0}, step=7)
    logger.log_metrics({"merge/accepted": True}, step=5)
    logger.log_metrics({"final": 1.0})
    logger.finalize("success")
    rows = rows_of(tmp_path)
    assert [int(row["step"]) for row in rows] == list(range(1, 8))
    assert list(rows[0]) == ["step", "train/loss", "val/loss", "merge/accepted"]
    assert float(rows[6]["val/loss"]) == 2.0
    assert float(rows[4]["merge/accepted"]) == 1.0
    assert rows[0]["val/loss"] == ""
    assert float(rows[2]["train/loss"]) == 1.0 / 3


def test_a_crash_loses_at_most_the_rows_not_flushed(tmp_path):
    log_steps(CurvesLogger(tmp_path, flush_every_n_rows=10), range(1, 36))
    kept = [int(row["step"]) for row in rows_of(tmp_path)]
    assert kept == list(range(1, len(kept) + 1))
    assert 35 - len(kept) <= 11


def test_after_a_resume_each_step_is_there_once(tmp_path):
    """Lightning #19764: an interrupted and resumed run has the curve of an uninterrupted one."""
    first = CurvesLogger(tmp_path)
    log_steps(first, range(1, 58))
    first.log_metrics({"val/loss": 3.0}, step=40)
    first.save()
    resumed = CurvesLogger(tmp_path)
    log_steps(resumed, range(41, 61), extra=1.0)
    resumed.save()
    whole = CurvesLogger(tmp_path / "whole")
    log_steps(whole, range(1, 61))
    whole.save()
    rows, expected = rows_of(tmp_path), rows_of(tmp_path / "whole")
    assert [(row["step"], row["train/loss"]) for row in rows] == [
        (r["step"], r["train/loss"]) for r in expected
    ]
    assert [row["extra"] for row in rows] == [""] * 40 + ["1.0"] * 20
    assert rows[39]["val/loss"] == "3.0"


def test_figures_logged_again_at_the_step_of_the_checkpoint_do_not_make_a_second_row(tmp_path):
    first = CurvesLogger(tmp_path)
    log_steps(first, range(1, 51))
    first.save()
    resumed = CurvesLogger(tmp_path)
    resumed.log_metrics({"val/loss": 1.5}, step=40)
    log_steps(resumed, range(41, 44))
    resumed.save()
    rows = rows_of(tmp_path)
    assert [int(row["step"]) for row in rows] == list(range(1, 44))
    assert (rows[39]["val/loss"], rows[39]["train/loss"]) == ("1.5", repr(1.0 / 40))


def test_a_line_that_a_crash_cut_short_is_dropped(tmp_path):
    (tmp_path / "curves.csv").write_text("step,train/loss\n1,0.5\n2,0.25\n3,0.12")
    resumed = CurvesLogger(tmp_path)
    log_steps(resumed, [4])
    resumed.save()
    assert [(row["step"], row["train/loss"]) for row in rows_of(tmp_path)] == [
        ("1", "0.5"),
        ("2", "0.25"),
        ("4", "0.25"),
    ]


def test_opening_the_logger_of_a_finished_run_changes_nothing(tmp_path):
    first = CurvesLogger(tmp_path)
    log_steps(first, range(1, 5))
    first.save()
    before = (tmp_path / "curves.csv").read_bytes()
    CurvesLogger(tmp_path).save()
    assert (tmp_path / "curves.csv").read_bytes() == before


def test_a_foreign_file_is_refused_and_left_alone(tmp_path):
    (tmp_path / "curves.csv").write_text("name,value\na,1\n")
    with pytest.raises(OutputError, match=r"curves\.csv"):
        CurvesLogger(tmp_path)
    assert (tmp_path / "curves.csv").read_text() == "name,value\na,1\n"


def test_only_rank_zero_writes(tmp_path, monkeypatch):
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    monkeypatch.setattr(rank_zero_only, "rank", 1)
    loggers = make_loggers(tmp_path / "run", decision=OFFLINE, config=LoggerConfig())
    for logger in loggers:
        logger.log_metrics({"train/loss": 1.0}, step=1)
    assert finish_loggers(loggers) == []
    assert not (tmp_path / "run").exists()


# --- W&B itself

FIT_TWICE = """
import sys, warnings
warnings.filterwarnings("ignore", module="lightning")
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from zen_train.tracking import *
config = LoggerConfig()
decision = resolve_wandb(config.wandb, run_folder=sys.argv[1])
print(decision.line())
class Model(BoringModel):
    def on_train_batch_end(self, *args):
        for logger in self.loggers:
            logger.log_metrics({"train/loss": 1.0}, step=self.trainer.global_step)
for steps in (3, 5):
    loggers = make_loggers(sys.argv[1], decision=decision, config=config, run_name="coder")
    Trainer(
        max_steps=steps, logger=loggers, accelerator="cpu", enable_progress_bar=False, limit_val_batches=0,
        enable_checkpointing=False, enable_model_summary=False,
    ).fit(Model())
    print(*finish_loggers(loggers))
    print("id", loggers[1].version)
"""


@pytest.mark.parametrize("terminal", [False, True])
def test_without_a_key_the_run_completes_offline_and_a_resume_keeps_its_id(tmp_path, terminal):
    """unsloth #1914, LMFlow #65: no prompt with or without a terminal, and the folder is named."""
    leader, follower = pty.openpty()
    try:
        done, seconds = run_script(FIT_TWICE, tmp_path, stdin=follower if terminal else subprocess.DEVNULL)
    finally:
        os.close(leader)
        os.close(follower)
    assert seconds < 60
    assert "W&B offline: no API key" in done.stdout
    folders = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert all(str(folder) in done.stdout for folder in folders)
    run_id = json.loads((tmp_path / "run" / "wandb_run.json").read_text())["id"]
    assert done.stdout.count(f"id {run_id}") == 2
    # wandb adds "-1" to the name of a second folder of the same second
    assert all(folder.name.split("-")[3] == run_id for folder in folders)
    assert [int(row["step"]) for row in rows_of(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert "wandb:" not in done.stdout + done.stderr


START_ONLINE = """
import sys, time
from zen_train.tracking import *
started = time.monotonic()
config = LoggerConfig(wandb=WandbConfig(init_timeout_s=3, finish_timeout_s=3))
loggers = make_loggers(sys.argv[1], decision=WandbDecision(mode="online", reason="test"), config=config)
for step in (1, 2):
    for logger in loggers:
        logger.log_metrics({"train/loss": 1.0}, step=step)
print(*finish_loggers(loggers))
print("seconds", time.monotonic() - started)
"""


@pytest.mark.parametrize("failure", ["silent server", "key refused by wandb"])
def test_an_online_run_that_cannot_start_goes_offline_in_seconds(tmp_path, silent_port, failure):
    env = {"WANDB_BASE_URL": f"http://127.0.0.1:{silent_port}", "WANDB_ERROR_REPORTING": "false"}
    key = FAKE_KEY if failure == "silent server" else "short"
    done, _ = run_script(START_ONLINE, tmp_path, WANDB_API_KEY=key, **env)
    assert float(done.stdout.split("seconds ")[1]) < 45
    assert "W&B offline run in" in done.stdout
    assert done.stderr.count("W&B failed while starting") == 1
    assert len(rows_of(tmp_path / "run")) == 2


LOSE_THE_SERVICE = """
import os, signal, sys, time
from pathlib import Path
from zen_train.tracking import *
config = LoggerConfig(wandb=WandbConfig(finish_timeout_s=3))
loggers = make_loggers(sys.argv[1], decision=WandbDecision(mode="offline", reason="test"), config=config)
def log(step):
    for logger in loggers:
        logger.log_metrics({"train/loss": 1.0}, step=step)
log(1)
children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
services = [int(pid) for pid in children if "wandb" in Path(f"/proc/{pid}/cmdline").read_text()]
assert services
for pid in services:
    os.kill(pid, signal.SIGKILL)
time.sleep(0.5)
for step in range(2, 30):
    log(step)
finish_loggers(loggers)
print("went on")
"""


@pytest.mark.skipif(
    not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="needs Linux's /proc"
)
def test_a_wandb_that_dies_in_mid_run_is_one_warning(tmp_path):
    done, seconds = run_script(LOSE_THE_SERVICE, tmp_path)
    assert "went on" in done.stdout
    assert done.stderr.count("W&B failed while") == 1
    assert len(rows_of(tmp_path / "run")) == 29
    assert seconds < 60


class RecordingRun:
    """Stands for an online run, which needs a server: keeps what it is given."""

    def __init__(self, *, finish_s=0.0):
        self.used, self.logged, self.finish_s = [], [], finish_s

    def use_artifact(self, artifact):
        self.used.append(artifact)

    def log_artifact(self, artifact):
        self.logged.append(artifact)

    def log(self, *args, **kwargs):
        raise ConnectionError("network is gone")

    def finish(self, *, exit_code):
        time.sleep(self.finish_s)


def online_loggers(folder, run, **limits):
    decision = WandbDecision(mode="online", reason="test")
    loggers = make_loggers(folder, decision=decision, config=LoggerConfig(wandb=WandbConfig(**limits)))
    loggers[1]._experiment = run
    return loggers


def test_the_delta_folder_is_logged_with_the_base_as_its_input(tmp_path):
    delta = tmp_path / "delta"
    delta.mkdir()
    (delta / "delta.safetensors").write_bytes(b"1")
    (delta / "delta_config.json").write_text("{}")
    run = RecordingRun()
    loggers = online_loggers(tmp_path / "run", run)
    log_artifact(loggers, delta, name="coder delta", metadata={"share_kept": 0.9}, base_name="org/base model")
    (base,), (artifact,) = run.used, run.logged
    assert (base.type, base.name, base.metadata) == (
        "base-model",
        "org-base-model",
        {"name": "org/base model"},
    )
    assert sorted(artifact.manifest.entries) == ["delta.safetensors", "delta_config.json"]
    assert (artifact.type, artifact.name, artifact.metadata) == ("delta", "coder-delta", {"share_kept": 0.9})


def test_nothing_is_staged_for_upload_offline(tmp_path):
    run = RecordingRun()
    loggers = make_loggers(tmp_path / "run", decision=OFFLINE, config=LoggerConfig())
    loggers[1]._experiment = run
    log_artifact(loggers, tmp_path, name="delta", metadata={}, base_name="base")
    assert run.logged == []


def test_failures_are_warned_about_once(tmp_path):
    loggers = online_loggers(tmp_path / "run", RecordingRun())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            loggers[1].log_metrics({"train/loss": 1.0}, step=step)
        log_artifact(loggers, tmp_path / "missing", name="delta", metadata={}, base_name="base")
    assert [str(w.message) for w in caught if "W&B failed" in str(w.message)] == [
        "W&B failed while logging figures (ConnectionError: network is gone); training goes on, "
        f"curves are in curves.csv and {tmp_path / 'run' / 'wandb'}"
    ]


def test_a_finish_that_hangs_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("zen_train.tracking.wandb_logger.FINISH_GRACE_S", 0.1)
    loggers = online_loggers(tmp_path / "run", RecordingRun(finish_s=30), finish_timeout_s=0.2)
    started = time.monotonic()
    with pytest.warns(UserWarning, match="still busy"):
        finish_loggers(loggers)
    assert time.monotonic() - started < 5


def test_a_damaged_run_id_file_is_named(tmp_path):
    (tmp_path / "wandb_run.json").write_text("{")
    with pytest.raises(OutputError, match=r"wandb_run\.json"):
        make_loggers(tmp_path, decision=OFFLINE, config=LoggerConfig())


def test_disabled_makes_the_csv_only(tmp_path):
    loggers = make_loggers(
        tmp_path, decision=WandbDecision(mode="disabled", reason="test"), config=LoggerConfig()
    )
    assert [type(logger).__name__ for logger in loggers] == ["CurvesLogger"]
    assert finish_loggers(loggers) == []


def test_importing_the_package_loads_neither_lightning_nor_wandb(tmp_path):
    script = "import sys, zen_train.tracking; assert not {'lightning', 'wandb', 'torch'} & sys.modules.keys()"
    run_script(script, tmp_path)
