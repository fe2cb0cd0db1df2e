"""Who may import whom, and that the installed package is complete (design/architecture.md)."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TRAINING_FRAMEWORKS = ("lightning", "hydra", "omegaconf", "wandb")
TRAINING = (
    "lightning",
    "wandb",
    "zen_train.callbacks",
    "zen_train.module",
    "zen_train.run",
    "zen_train.trainer",
)
HTTP = ("fastapi", "httpx", "starlette", "uvicorn")
PURE = {
    "zen_train/merge": (*TRAINING_FRAMEWORKS, "transformers", "zen_train.callbacks", "zen_train.run"),
    "zen_train/delta": (*TRAINING_FRAMEWORKS, "zen_train.callbacks", "zen_train.run", "zen_train.module"),
    "kernels": (*TRAINING_FRAMEWORKS, "transformers"),
    "serve": TRAINING,
    "serve/cache": (*HTTP, "torch", "transformers", "zen_train.delta", "zen_train.kernels"),
    "serve/engine": (*HTTP, "hydra", "omegaconf", "zen_train.serve.api", "zen_train.serve.router"),
    "serve/router": (*HTTP, "torch", "transformers", "zen_train.kernels", "zen_train.serve.api"),
    "serve/store": (*HTTP, "torch", "transformers", "zen_train.kernels", "zen_train.serve.api"),
    "zen_train/report": (*TRAINING_FRAMEWORKS, "torch", "zen_train.callbacks", "zen_train.run"),
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize(("folder", "forbidden"), PURE.items(), ids=PURE)
def test_a_pure_package_stays_pure(folder, forbidden):
    assert sources(folder)
    for path in sources(folder):
        for name in imports(path):
            assert not any(name == bad or name.startswith(bad + ".") for bad in forbidden), (
                f"{path} imports {name}"
            )


def test_kernels_import_nothing_of_ours_but_kernels():
    for path in sources("kernels"):
        for name in imports(path):
            assert not name.startswith("zen_train") or name.startswith("zen_train.kernels"), (
                f"{path} imports {name}"
            )


def test_callbacks_know_neither_hydra_nor_wandb():
    for path in sources("zen_train/callbacks"):
        assert not imports(path) & {"hydra", "omegaconf", "wandb"}, path


def test_every_package_is_listed_for_the_wheel():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    listed = set(setup["packages"])
    mapped = {folder: name for name, folder in setup["package-dir"].items()}
    for folder, package in mapped.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.parent.relative_to(ROOT / folder).parts
            assert ".".join([package, *parts]) in listed, (
                f"{path.parent} is missing from [tool.setuptools] packages"
            )


def test_the_roots_of_kernels_and_serve_are_no_packages():
    """A package called kernels in the working folder would shadow the one that transformers imports."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "serve" / "__init__.py").exists()


def test_the_editable_install_finds_every_listed_package_from_any_folder(tmp_path):
    """kernels/ has no __init__.py, and setuptools' editable finder passes over such a folder inside a package."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    script = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, *setup["packages"]], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_nothing_is_loaded_by_pickle():
    for folder in ("zen_train", "kernels", "scripts", "serve"):
        for path in sources(folder):
            text = path.read_text()
            assert "import pickle" not in text, path
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                    assert any(
                        k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords
                    ), path
