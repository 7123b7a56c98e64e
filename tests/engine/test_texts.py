"""What a model writes by itself, and what drafters start from after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foretell import LLM, Sampling
from foretell.engine.texts import opening
from tests.cli.conftest import write_tiny

GREEDY = Sampling(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("texts"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))


def make(folder: Path, **options: Any) -> LLM:
    return LLM(folder, **{"drafter": "suffix+recycling", "draft_tokens": 4, "threads": 1, "max_batch": 4, **options})


def saved(llm: LLM) -> list[list[int]]:
    """The past responses that the drafter began with."""
    archive = llm.drafter.sources["suffix"]._saved  # type: ignore[attr-defined]
    ends = archive.lengths.cumsum().tolist()
    return [archive.tokens[start:end].tolist() for start, end in zip([0, *ends], ends, strict=False)]


def test_a_conversation_is_opened_where_the_user_speaks(folder: Path) -> None:
    llm = make(folder)
    start, whole = opening(llm), llm.encode_chat([{"role": "user", "content": "Hello"}])
    assert whole[: len(start)] == start and llm.tokenizer is not None
    assert llm.tokenizer.decode(whole[len(start) :]).startswith("Hello")


def test_what_was_learnt_without_data_is_there_at_the_next_start(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    llm = make(folder)
    llm.warm(lambda done, total: told.append((done, total)), texts=30)
    vocab = llm.target.vocab_size
    assert (vocab, vocab) in told and told[-1] == (60, 60) and sorted(told[-60:]) == told[-60:]
    kept = {file.name for file in llm.folder.iterdir() if file.suffix != ".json"}  # less what forwards cost
    assert llm.engine.scheduler.idle and kept == {"past.npz", "successors.npz"}
    written = saved(llm)
    start = opening(llm)
    assert 3 <= len(written) <= 30 and all(text[: len(start)] == start for text in written)
    plain = make(folder, drafter="none").generate(written[0][: len(start) + 20], GREEDY)[0]
    fresh, cold = make(folder), make(folder)
    cold.drafter = cold.engine.drafter = type(fresh.drafter)(  # the same sources, knowing nothing
        {
            name: type(source)(*([vocab] if name == "recycling" else []))
            for name, source in fresh.drafter.sources.items()
        }
    )
    rounds = []
    for made in (fresh, cold):
        done = made.generate(plain.prompt_token_ids, GREEDY)[0]
        assert done.token_ids == plain.token_ids
        rounds.append(done.stats.rounds)
    assert rounds[0] < rounds[1]


def test_only_the_matrix(folder: Path) -> None:
    llm = make(folder)
    llm.warm(texts=0)
    assert not saved(llm)
    with pytest.raises(ValueError, match="texts must be"):
        llm.warm(texts=-1)


def test_a_folder_of_ones_own(folder: Path, tmp_path: Path) -> None:
    llm = make(folder)
    llm.generate("abcabcabc", GREEDY)
    llm.save_drafter(tmp_path / "mine")
    other = make(folder)
    assert not saved(other)
    other.load_drafter(tmp_path / "mine")
    assert len(saved(other)) == 1
    with pytest.raises(ValueError, match="there is no folder"):
        other.load_drafter(tmp_path / "nowhere")
