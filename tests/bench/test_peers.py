"""Peers: that each runs apart and only in its turn, that no failure of theirs loses anything, and their weights."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell import LLM
from foretell.bench import peers
from foretell.bench.decode import Settings as DecodeSettings
from foretell.bench.decode import decode
from foretell.bench.peers import PEERS, Peers, Settings, write_folder, write_gguf, written
from foretell.bench.peers.process import WORKER, PeerError
from foretell.bench.questions import Question
from foretell.cli.peers import PeerOptions
from foretell.models.load import open_checkpoint, tensor_shapes
from tests.cli.conftest import write_tiny
from tests.cli.run import foretell
from tests.models.small import CLASSES, SMALL

QUESTIONS = [Question("list", "one two three one two"), Question("text", "a cat"), Question("list", "four, four, four")]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_tiny(tmp_path_factory.mktemp("models") / "tiny"), "ngram", max_batch=1, max_context=400)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, llm: LLM) -> Callable[..., Peers]:
    """Peers that are the fake worker in that mode."""

    def make(mode: str, *names: str, **settings: Any) -> Peers:
        monkeypatch.setattr(peers, "WORKER", Path(__file__).with_name("fake_worker.py"))
        monkeypatch.setenv("FAKE_PEER", mode)
        monkeypatch.setenv("FAKE_LOG", str(tmp_path / "options.json"))
        llm.folder = tmp_path
        model = str(write_tiny(tmp_path / "tiny"))
        return Peers(Settings(names or ("transformers",), **settings), llm, model, "auto", 2)

    return make


def opened(found: Peers) -> Peers:
    found.open(100, 1, lambda line: None, lambda: False)
    return found


def stands_still(process: Any) -> bool:
    """Whether it comes to be stopped by a signal, which takes the system a moment."""
    stat = Path(f"/proc/{process._process.pid}/stat")
    deadline = time.monotonic() + 10
    while stat.read_text().rpartition(") ")[2][0] != "T":
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it reads /proc")


@linux
def test_a_peer_runs_in_its_turn_alone(fake: Callable[..., Peers]) -> None:
    with opened(fake("works")) as found:
        process = found.alive["transformers"]
        assert stands_still(process)
        answers = found.ask("transformers", [[7, 8], [9]], [3, 2], lambda: False)
        assert stands_still(process)
        assert answers is not None and answers[1] == 2.0
        assert [(a.token_ids, a.first, a.first_s, a.last_s) for a in answers[0]] == [
            ([7, 7, 7], 1, 0.5, 1.0),
            ([9, 9], 1, 0.5, 0.75),
        ]
    assert not Path(f"/proc/{process._process.pid}").exists()


def test_a_peer_is_told_what_to_load(fake: Callable[..., Peers], tmp_path: Path) -> None:
    with fake("works", "llama.cpp-lookup", draft_tokens=7) as found:
        found.open(123, 1, lambda line: None, lambda: False)
        told = json.loads((tmp_path / "options.json").read_text())
        assert told | {"model": "", "cache": ""} == {
            "engine": "llama", "module": "llama_cpp", "model": "", "cache": "", "dtype": "float32", "threads": 2,
            "draft_tokens": 7, "context": 123, "concurrency": 1,
        }  # fmt: skip
        assert Path(told["model"]).name == "float32.gguf"
        assert found.notes["llama.cpp-lookup"] == {"version": "1.5", "dtype": "float32", "draft_tokens": 7}


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("missing", "has no transformers: pip install 'transformers>=5' torch"),
        ("cannot load", "it cannot load the model: ValueError: odd"),
        ("dies at once", "it ended with exit code 3: no memory left"),
    ],
)
def test_a_peer_that_cannot_load_is_left_out(fake: Callable[..., Peers], mode: str, reason: str) -> None:
    with opened(fake(mode)) as found:
        assert not found.alive and reason in found.notes["transformers"]["skipped"]


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("hangs", "it has not answered within 0.5 s"),
        ("fails", "ValueError: cannot"),
        ("babbles", "it answered something that is not JSON"),
        ("is short", "it gave 4 tokens where 5 were wanted"),
    ],
)
def test_a_peer_that_fails_is_gone(fake: Callable[..., Peers], mode: str, reason: str) -> None:
    with opened(fake(mode, timeout_s=0.5 if mode == "hangs" else 60)) as found:
        process = found.alive["transformers"]
        assert found.ask("transformers", [[1]], [5], lambda: False) is None
        assert not found.alive and found.notes["transformers"]["failed"] == reason
        assert process._process.returncode is not None


def test_a_crash_loses_nothing(fake: Callable[..., Peers], llm: LLM) -> None:
    """The peer answers the warm-up and the first prompt, and dies at the second of three."""
    with fake("crashes") as found:
        report = decode(llm, QUESTIONS, DecodeSettings(max_tokens=9, repetitions=1), found)
    assert report["complete"] and report["all"]["prompts"] == 3 and report["all"]["identical"]
    assert report["peers"]["transformers"]["failed"] == "it ended with signal SIGABRT: MemoryError: too much"
    there = report["all"]["peers"]["transformers"]
    assert there["prompts"] == 1 and there["tokens"] == 9
    assert there["tokens_per_second"] == pytest.approx(4) and there["ttft_ms"] == 500 and there["tpot_ms"] == 250
    kinds = {row["kind"]: row for row in report["kinds"]}
    assert kinds["text"]["peers"]["transformers"] is None
    first = kinds["list"]["peers"]["transformers"]  # ratios are of the one prompt that both answered
    assert first["plain_ratio"] == there["plain_ratio"] > 0


def test_peers_are_greedy(fake: Callable[..., Peers], llm: LLM) -> None:
    with pytest.raises(ValueError, match="peers decode greedily"):
        decode(llm, QUESTIONS, DecodeSettings(temperature=0.5), fake("works"))


def test_stopping_does_not_wait_for_a_peer(fake: Callable[..., Peers]) -> None:
    with opened(fake("hangs")) as found:
        asked = iter([False, True])
        started = time.monotonic()
        assert found.ask("transformers", [[1]], [5], lambda: next(asked)) is None
        assert time.monotonic() - started < 10 and not found.alive and "failed" not in found.notes["transformers"]


def test_a_python_that_is_not_there(fake: Callable[..., Peers]) -> None:
    with opened(fake("works", pythons={"transformers": "/nowhere/python"})) as found:
        assert "/nowhere/python cannot be started" in found.notes["transformers"]["skipped"]


def test_what_a_peer_cannot_do_is_not_tried(fake: Callable[..., Peers]) -> None:
    with fake("works", "transformers", "vllm") as found:
        found.open(100, 4, lambda line: None, lambda: False)
        assert list(found.alive) == ["vllm"] and "one request at a time" in found.notes["transformers"]["skipped"]
    with fake("works", "transformers", "openvino") as found:
        found._dtype = "int8"
        opened(found)
        assert list(found.alive) == ["openvino"] and "cannot compute in int8" in found.notes["transformers"]["skipped"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (PeerOptions("nothing"), "no peer 'nothing': choose from transformers, "),
        (PeerOptions(" , "), "--peers names none"),
        (
            PeerOptions("vllm", ["vllm"]),
            "--peer-python takes a name and a path, as in vllm=venv/bin/python, not 'vllm'",
        ),
        (PeerOptions("vllm", ["gpt=x"]), "a Python was named for 'gpt', which is not one of transformers, llama.cpp"),
        (PeerOptions("vllm", peer_draft_tokens=0), "draft tokens must be at least 1"),
        (PeerOptions("vllm", peer_timeout=0), "timeout must be above 0"),
    ],
)
def test_bad_options(options: PeerOptions, reason: str) -> None:
    with pytest.raises(ValueError, match=reason.replace("(", r"\(")):
        options.settings()


def test_options() -> None:
    assert PeerOptions("all").settings().names == list(PEERS)
    settings = PeerOptions("vllm, llama.cpp,vllm", ["vllm=/a=b"], 3, 9.0).settings()
    assert settings == Settings(["vllm", "llama.cpp"], {"vllm": "/a=b"}, 3, 9.0)
    assert PeerOptions().settings().names == []


# The worker


def worker() -> Any:
    spec = importlib.util.spec_from_file_location("worker", WORKER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Counting:
    """Gives request i the tokens 100 i, 100 i + 1, ..., two at a step."""

    def __init__(self) -> None:
        self.running: dict[int, int] = {}
        self.most, self.cleared = 0, 0

    def clear(self) -> None:
        self.cleared += 1

    def start(self, id: int, prompt: list[int], count: int) -> None:
        self.running[id] = 100 * prompt[0]
        self.most = max(self.most, len(self.running))

    def step(self) -> dict[int, list[int]]:
        new = {id: [at, at + 1] for id, at in self.running.items()}
        self.running = {id: at + 2 for id, at in self.running.items()}
        return new

    def done(self, id: int) -> None:
        del self.running[id]


def test_the_worker_keeps_so_many_running() -> None:
    engine = Counting()
    answers = worker()._answer(engine, [[i] for i in range(5)], [3, 1, 4, 1, 5], 2)["answers"]
    assert [a["token_ids"] for a in answers] == [
        [0, 1, 2],
        [100],
        [200, 201, 202, 203],
        [300],
        [400, 401, 402, 403, 404],
    ]
    assert engine.most == 2 and engine.cleared == 1 and not engine.running
    assert [a["first"] for a in answers] == [2, 1, 2, 1, 2]
    assert all(0 < a["first_s"] <= a["last_s"] for a in answers)


def test_workers_import_nothing_of_ours() -> None:
    for path in WORKER.parent.glob("*.py"):
        assert "import foretell" not in path.read_text() and "from foretell" not in path.read_text()


def test_every_peer_has_a_worker() -> None:
    for kind in PEERS.values():
        assert (WORKER.parent / f"{kind.engine}.py").is_file()


def test_the_worker_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """The real one, with a module that nobody has."""
    llm.folder = tmp_path
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    model = str(write_tiny(tmp_path / "tiny"))
    with Peers(Settings(("vllm",)), llm, model, "auto", 1) as found:
        opened(found)
        skipped = found.notes["vllm"]["skipped"]
    assert f"{sys.executable} has no vllm: pip install vllm" in skipped and "--peer-python vllm=PATH" in skipped


def test_transformers_beside_us(tmp_path: Path) -> None:
    """The real thing: equal weights in float32 say the same, and a page is written."""
    folder, page = write_tiny(tmp_path / "tiny"), tmp_path / "page.html"
    options = ("-m", folder, "-n", 24, "--repetitions", 2, "--kind", "code", "--kind", "edit", "--threads", 1)
    names = "transformers,transformers-lookup"
    result = foretell("bench", "decode", *options, "--peers", names, "--html", page, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["complete"] and [row["kind"] for row in report["kinds"]] == ["code", "edit"]
    for row in [*report["kinds"], report["all"]]:
        for name in names.split(","):
            there = row["peers"][name]
            assert there["agreed_tokens"] == there["tokens"] == row["tokens"]
            for engine in ("plain", "drafted"):
                ratio = row[engine]["tokens_per_second"] / there["tokens_per_second"]
                assert there[f"{engine}_ratio"] == pytest.approx(ratio)
    assert report["peers"]["transformers"]["draft_tokens"] == 0
    assert report["peers"]["transformers-lookup"]["draft_tokens"] == 5
    text = page.read_text()
    assert text.count("<svg") == 2 and "transformers-lookup" in text and "Beside other engines" in text


# Weights


def saved(folder: Path, architecture: str, **settings: Any) -> Path:
    """A folder of random weights, all of them different from what a fresh model has."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = CLASSES[architecture](
        **{
            **SMALL,
            "num_hidden_layers": 2,
            "eos_token_id": 2,
            "sliding_window": None,
            "rms_norm_eps": 2**-20,
            **settings,
        }
    )
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.normal_()
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("LlamaForCausalLM", {"tie_word_embeddings": True}),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {"head_dim": 32}),
    ],
)
def test_weights_come_back_as_they_were(tmp_path: Path, architecture: str, settings: dict[str, Any]) -> None:
    """Folder -> GGUF -> folder, all in float32."""
    first = open_checkpoint(saved(tmp_path / "first", architecture, **settings))
    write_gguf(first, "float32", tmp_path / "m.gguf")
    second = open_checkpoint(tmp_path / "m.gguf")
    write_folder(second, torch.float32, tmp_path / "third")
    third = open_checkpoint(tmp_path / "third")
    assert first.config is not None and second.config == first.config == third.config
    for name in tensor_shapes(first.config):
        assert torch.equal(first.tensor(name), second.tensor(name)) and torch.equal(
            first.tensor(name), third.tensor(name)
        )


def test_dtypes_of_gguf(tmp_path: Path) -> None:
    source = open_checkpoint(write_tiny(tmp_path / "tiny"))
    name = "layers.0.mlp.gate_proj.weight"
    exact = source.tensor(name)
    for dtype, error in (("bfloat16", 2**-8), ("float16", 2**-11), ("int8", 2**-7)):
        write_gguf(source, dtype, tmp_path / f"{dtype}.gguf")
        found = open_checkpoint(tmp_path / f"{dtype}.gguf").tensor(name).float()
        assert 0 < (found - exact).abs().max() <= error * exact.abs().max()
        if dtype != "int8":
            assert torch.equal(found, exact.to(getattr(torch, dtype)).float())


def test_scaled_rotations_are_written_as_factors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_theta": 10000.0,
    }  # fmt: skip
    source = open_checkpoint(saved(tmp_path / "source", "LlamaForCausalLM", rope_parameters=scaling))
    write_gguf(source, "float32", tmp_path / "m.gguf")
    found = open_checkpoint(tmp_path / "m.gguf")
    from foretell.models.config import inverse_frequencies

    assert source.config is not None and found.config is not None
    torch.testing.assert_close(inverse_frequencies(found.config)[0], inverse_frequencies(source.config)[0])
    with pytest.raises(ValueError, match="rotary factors"):
        write_folder(found, torch.float32, tmp_path / "folder")


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    source = open_checkpoint(saved(tmp_path / "window", "MistralForCausalLM", sliding_window=8))
    with pytest.raises(ValueError, match="sliding window"):
        write_gguf(source, "float32", tmp_path / "m.gguf")
    odd = open_checkpoint(saved(tmp_path / "odd", "LlamaForCausalLM", intermediate_size=80))
    with pytest.raises(ValueError, match="rows of 80 do not fit Q8_0's blocks"):
        write_gguf(odd, "int8", tmp_path / "m.gguf")


def test_files_are_written_whole_and_once(tmp_path: Path) -> None:
    path = tmp_path / "there" / "file"

    def torn(fresh: Path) -> None:
        fresh.write_text("half")
        raise OSError("disk full")

    with pytest.raises(ValueError, match="cannot be written to .*file: disk full"):
        written(path, torn)
    assert not path.exists()
    assert written(path, lambda fresh: None if fresh.write_text("whole") else None).read_text() == "whole"
    assert written(path, torn).read_text() == "whole"


def test_errors_of_peers_are_not_the_users() -> None:
    assert not issubclass(PeerError, ValueError)
    assert os.access(WORKER, os.R_OK)
