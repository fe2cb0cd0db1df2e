"""The wheel holds everything, under one installed name, and works from any folder, also inside the clone."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LOOK = """
import importlib.resources as resources, importlib.util, sys
import zen_train, zen_train.merge, zen_train.delta, zen_train.report, zen_train.tracking
import zen_train.kernels.sign_pack
from zen_train.overrides import config_groups
from transformers import LlamaForCausalLM
assert zen_train.__file__.startswith(sys.argv[1]), zen_train.__file__
assert str(resources.files("zen_train.conf")).startswith(sys.argv[1])
assert len(config_groups()["variant"]) == 14
assert (resources.files("zen_train.delta") / "FORMAT.md").is_file()
assert (resources.files("zen_train.report") / "report.html.jinja").is_file()
for name in ("kernels", "serve", "conf"):
    spec = importlib.util.find_spec(name)
    assert spec is None or spec.origin is None, f"{name} is importable as a regular package: {spec}"
csrc = resources.files("zen_train.kernels.cpu") / "csrc"
assert {"ops.cpp", "zt.h", "rowwise.inc"} <= {file.name for file in csrc.iterdir()}
print("complete")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    for name in files.stdout.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
    ]
    subprocess.run([*command, str(source)], check=True, timeout=200)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.mark.parametrize("place", ["elsewhere", "in the clone"])
def test_the_installed_package_is_complete(installed, tmp_path, place):
    folder = tmp_path if place == "elsewhere" else ROOT
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOOK, str(installed)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("complete")


def test_the_command_line_runs_from_the_wheel(installed, tmp_path):
    done = subprocess.run(
        [sys.executable, "-P", "-m", "zen_train", "+variant=coder", "--cfg", "job"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "zen4-coder" in done.stdout
