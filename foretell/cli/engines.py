"""What a plan comes to in other engines: their names for the same method and number, from their own documentation.

vLLM: docs/features/speculative_decoding (n_gram, suffix, draft_model, dynamic_speculative_decoding). SGLang:
docs/advanced_features/speculative_decoding; its number of draft tokens counts the root. TensorRT-LLM:
docs/source/features/speculative-decoding, and max_concurrency of llmapi/llm_args.py. llama.cpp: docs/speculative.md and
the names of its pull request 22397.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from shlex import quote

from foretell.drafters import MIXTURE

NGRAM, SUFFIX, DRAFT_MODEL = "n-gram lookup", "suffix matching", "a draft model"
# which of these a method of ours is nearest to; the others have no relative elsewhere
RELATIVES = {"ngram": NGRAM, "suffix": SUFFIX}
PARTS = 6  # of a schedule that is worth writing down
LARGEST_NGRAM, SMALLEST_NGRAM = 3, 1  # as our own n-gram drafter looks up


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan's answer. length: draft tokens, 0 is plain decoding; schedule: (first, last, length) of batches."""

    model: str
    drafter: str
    draft_model: str | None
    length: int
    schedule: Sequence[tuple[int, int, int]]

    @property
    def method(self) -> str | None:
        """What it is called in general; None if no other engine has its like."""
        if self.draft_model is not None:
            return DRAFT_MODEL
        members = MIXTURE if self.drafter == "auto" else self.drafter.split("+")
        known = [RELATIVES[name] for name in members if name in RELATIVES]
        return next((method for method in (SUFFIX, NGRAM) if method in known), None)

    @property
    def last_batch(self) -> int:
        """The largest batch before drafting stops to pay; 0 if it never pays, or never stops to."""
        return next((first - 1 for first, _, length in self.schedule if length == 0), 0)


@dataclass(frozen=True, slots=True)
class Setting:
    """engine: its name. code: to be copied; note: what there is to know, or why there is nothing to copy."""

    engine: str
    code: str = ""
    note: str = ""


def settings(choice: Choice) -> list[Setting]:
    """Of foretell first, then of each other engine."""
    found = [_foretell(choice)]
    for engine, build in _ENGINES.items():
        if choice.length == 0:
            found.append(Setting(engine, note="leave the options for speculative decoding out"))
        elif choice.method is None:
            found.append(Setting(engine, note=f"nothing like drafter {choice.drafter!r} there"))
        else:
            found.append(build(choice, choice.method))
    return found


def _foretell(choice: Choice) -> Setting:
    if choice.length == 0:
        return Setting("foretell", f"foretell chat --model {quote(choice.model)} --drafter none")
    draft = f" --draft-model {quote(choice.draft_model)}" if choice.draft_model else f" --drafter {choice.drafter}"
    return Setting("foretell", f"foretell chat --model {quote(choice.model)}{draft} --draft-tokens {choice.length}")


def _vllm(choice: Choice, method: str) -> Setting:
    methods: dict[str, dict[str, object]] = {
        NGRAM: {"method": "ngram", "prompt_lookup_max": LARGEST_NGRAM, "prompt_lookup_min": SMALLEST_NGRAM},
        SUFFIX: {"method": "suffix"},
        DRAFT_MODEL: {"method": "draft_model", "model": choice.draft_model},
    }
    config = {**methods[method], "num_speculative_tokens": choice.length}
    note = ""
    if 1 < len(choice.schedule) <= PARTS:
        lengths = json.dumps({"num_speculative_tokens_per_batch_size": [list(part) for part in choice.schedule]})
        note = f"by batch it would be {lengths[1:-1]}, which its documentation calls tested with EAGLE and DFlash only"
    return Setting("vLLM", f"vllm serve {quote(choice.model)} --speculative-config {quote(json.dumps(config))}", note)


def _sglang(choice: Choice, method: str) -> Setting:
    start = f"python3 -m sglang.launch_server --model {quote(choice.model)} --speculative-algorithm "
    count = f"--speculative-num-draft-tokens {choice.length + 1}"
    if method == DRAFT_MODEL:
        draft = (
            f"--speculative-draft-model-path {quote(choice.draft_model or '')} --speculative-num-steps {choice.length}"
        )
        return Setting("SGLang", f"{start}STANDALONE {draft} --speculative-eagle-topk 1 {count}")
    other = "it has no suffix matching; its n-grams are kept in a trie over past tokens. " if method == SUFFIX else ""
    return Setting("SGLang", f"{start}NGRAM {count}", f"{other}NGRAM runs on CUDA only")


def _tensorrt(choice: Choice, method: str) -> Setting:
    methods: dict[str, dict[str, object]] = {
        NGRAM: {"decoding_type": "NGram", "max_matching_ngram_size": LARGEST_NGRAM},
        SUFFIX: {"decoding_type": "SA"},
        DRAFT_MODEL: {"decoding_type": "DraftTarget", "speculative_model": choice.draft_model},
    }
    fields = {**methods[method], "max_draft_len": choice.length}
    if choice.last_batch:
        fields["max_concurrency"] = choice.last_batch
    lines = "".join(f"\n  {name}: {value}" for name, value in fields.items())
    return Setting(
        "TensorRT-LLM",
        f"trtllm-serve {quote(choice.model)} --config config.yaml\n# config.yaml\nspeculative_config:{lines}",
    )


def _llama_cpp(choice: Choice, method: str) -> Setting:
    start = f"llama-server -m {_gguf(choice.model)} --spec-type "
    if method == DRAFT_MODEL:
        draft = f"--spec-draft-model {_gguf(str(choice.draft_model))} --spec-draft-n-max {choice.length}"
        return Setting("llama.cpp", f"{start}draft-simple {draft}")
    note = "it has no suffix matching; n-gram lookup is nearest" if method == SUFFIX else ""
    return Setting("llama.cpp", f"{start}ngram-simple --spec-ngram-simple-size-m {choice.length}", note)


def _gguf(model: str) -> str:
    """llama.cpp reads files of its own format only."""
    return quote(model if model.endswith(".gguf") else f"{model.rstrip('/').rpartition('/')[2]}.gguf")


_ENGINES: dict[str, Callable[[Choice, str], Setting]] = {
    "vLLM": _vllm,
    "SGLang": _sglang,
    "TensorRT-LLM": _tensorrt,
    "llama.cpp": _llama_cpp,
}
