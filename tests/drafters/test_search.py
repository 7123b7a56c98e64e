"""Sources and their tree: what each must find, what calibration learns, and that work and memory are bounded."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from foretell.drafters import Parts, build, check
from foretell.drafters import recycling as recycling_module
from foretell.drafters.base import NoDrafter
from foretell.drafters.index import RECENT, SEPARATOR, Archive, Index, Past, Walk
from foretell.drafters.ngram import NgramSource
from foretell.drafters.recycling import KINDS, WIDTH, RecyclingSource, Successors, successors, warm_successors
from foretell.drafters.search import NONE, Chances, Guess, SearchDrafter, Source
from foretell.drafters.suffix import SuffixSource
from foretell.kv.cache import Cache
from foretell.models.top import top_tokens
from foretell.planner.fixed import FixedPlanner
from foretell.types import Keys, Picks, Sampling, Seq
from tests.conftest import VOCAB, run, table_target, tiny_llama


def no_draw(logits: torch.Tensor, keys: Keys, k: int) -> Picks:
    raise AssertionError("sources draw nothing")


def text(tokens: list[int], id: int = 1, prompt: int | None = None) -> Seq:
    return Seq(id, tokens, len(tokens) if prompt is None else prompt, Sampling(), 0)


def proposed(drafter: SearchDrafter, seq: Seq, budget: int) -> list[tuple[int, ...]]:
    """The paths of the nodes."""
    tokens, parents = drafter.propose([seq], [budget], no_draw).trees()[0]
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append(((*paths[parent], token)) if parent >= 0 else (token,))
    return paths


def odds(chance: float) -> float:
    return math.log(chance / (1 - chance))


class Scripted(Source):
    """chances: of a guess of each kind, were it the only one."""

    def __init__(self, chances: list[float], known: dict[tuple[int, ...], list[Guess]]) -> None:
        self.kinds, self.known = [odds(chance) for chance in chances], known

    def view(self, seq: Seq) -> Scripted:
        return self

    def guesses(self, path: tuple[int, ...]) -> list[Guess]:
        return self.known.get(path, [])


def test_the_likeliest_nodes_of_all_sources_fill_one_budget() -> None:
    one = Scripted([0.8, 0.2], {(): [(5, 0), (6, 1)], (5,): [(7, 0)], (5, 7): [(8, 1)]})
    two = Scripted([0.5], {(): [(6, 0), (9, 0)], (6,): [(4, 0)]})
    drafter = SearchDrafter({"one": one, "two": two})
    paths = proposed(drafter, text([1, 2]), 5)
    # odds at the root: 4 for 5, 1/4 * 1 for 6, 1 for 9, 1 for none: chances 16/25, 1/25, 4/25, 4/25; below them
    # 5 7 has .512 and 5 7 8 .1024
    assert paths == [(5,), (5, 7), (9,), (5, 7, 8), (6,)]


def test_what_follows_a_node_that_hardly_pays_is_not_asked() -> None:
    asked: list[tuple[int, ...]] = []

    class Asked(Scripted):
        def guesses(self, path: tuple[int, ...]) -> list[Guess]:
            asked.append(path)
            return super().guesses(path)

    source = Asked([0.8, 0.25], {(): [(5, 0), (6, 1)], (5,): [(7, 0)], (6,): [(8, 0)]})
    drafter = SearchDrafter({"": source})
    drafter.prices = [0.05] * 8  # of the root's children 5 has 4 / 5.33, 6 has .33 / 5.33 = .0625
    assert proposed(drafter, text([1, 2]), 8) == [(5,), (5, 7), (6,)]
    assert asked == [(), (5,), (5, 7)], "6 is worth its row, and not the time to look further"


def test_a_remark_about_none_makes_every_guess_less_likely() -> None:
    one = Scripted([0.8], {(): [(5, 0)]})
    chances = Chances([odds(0.8), odds(0.75)])
    assert chances.of(one.known[()])[5] == pytest.approx(4 / 5)
    assert chances.of([*one.known[()], (NONE, 1)]) == pytest.approx({5: 4 / 7, NONE: 3 / 7})
    assert proposed(SearchDrafter({"": Scripted([0.8, 0.5], {(): [(NONE, 1), (5, 0)]})}), text([1]), 3) == [(5,)]


def test_a_chain_takes_the_likeliest_child_only() -> None:
    one = Scripted([0.9, 0.2], {(): [(5, 0), (6, 1)], (5,): [(7, 1), (8, 0)]})
    assert proposed(SearchDrafter({"one": one}, width=1), text([1]), 6) == [(5,), (5, 8)]


def test_chances_become_what_came_true() -> None:
    """Two kinds that always speak together about two tokens, a third that is never heard."""
    chances = Chances([odds(0.9), odds(0.1), odds(0.3)])
    said = [(5, 0), (6, 1)]
    source = random.Random(0)
    for _ in range(3000):
        chances.learn(said, source.choices([5, 6, 7], [0.2, 0.5, 0.3])[0])
    learnt = chances.of(said)
    assert learnt[5] == pytest.approx(0.2, abs=0.05) and learnt[6] == pytest.approx(0.5, abs=0.07)
    assert learnt[NONE] == pytest.approx(0.3, abs=0.06) and chances.weights[2] == odds(0.3)


def test_a_source_that_is_wrong_loses_its_place() -> None:
    """On a text that the first source always misjudges, the second comes first after some rounds."""
    target = table_target()
    plain = run(target, NoDrafter(), [[3, 4]], [Sampling(temperature=0, max_tokens=60, ignore_eos=True)])[0].token_ids
    full = [3, 4, *plain]

    class Knows(Source):
        kinds = (odds(0.3),)

        def view(self, seq: Seq) -> Knows:
            self.length = len(seq.tokens)
            return self

        def guesses(self, path: tuple[int, ...]) -> list[Guess]:
            at = self.length + len(path)
            right = at < len(full) and full[self.length : at] == list(path)
            return [(full[at], 0)] if right else []

    class Errs(Knows):
        kinds = (odds(0.8),)

        def guesses(self, path: tuple[int, ...]) -> list[Guess]:
            return [((token + 1) % VOCAB, kind) for token, kind in super().guesses(path)]

    drafter = SearchDrafter({"errs": Errs(), "knows": Knows()})
    sampling = Sampling(temperature=0, max_tokens=60, ignore_eos=True)
    done = run(target, drafter, [[3, 4]], [sampling], draft_tokens=1)[0]
    assert done.token_ids == plain
    assert done.stats.accepted >= 8, "with room for one node the right source must have won it"


def test_suffix_finds_a_passage_again_after_an_edit() -> None:
    """Sixty tokens, then the same with one changed: every draft within the copy is right, and one after the edit is."""
    source = random.Random(2)
    passage = [source.randrange(10, 1000) for _ in range(60)]
    copy = [*passage[:30], 7, *passage[31:]]
    drafter = SearchDrafter({"suffix": SuffixSource()})
    hits = 0
    for at in range(3, 60):
        seq = text([*passage, 5, *copy[:at]])
        hits += any(path == (copy[at],) for path in proposed(drafter, seq, 6))
        drafter.forget(seq)
    assert hits >= 57 - 3, "more was lost than the edit and the token after it"


def test_suffix_remembers_past_responses_and_only_so_many() -> None:
    source = SuffixSource(past=100)
    drafter = SearchDrafter({"": source})
    first = text(list(range(100, 160)), id=1, prompt=10)
    source.view(first)
    drafter.forget(first)
    assert proposed(drafter, text([1, 120, 121, 122], id=2), 3)[-1] == (123, 124, 125)
    unanswered = text(list(range(300, 340)), id=3)
    source.view(unanswered)
    drafter.forget(unanswered)
    assert proposed(drafter, text([1, 310, 311, 312], id=4), 3) == [], "a request that said nothing is no response"
    second = text(list(range(200, 280)), id=5, prompt=10)
    source.view(second)
    drafter.forget(second)
    assert proposed(drafter, text([1, 120, 121, 122], id=6), 3) == [], "the oldest goes when there are too many"
    assert proposed(drafter, text([1, 220, 221, 222], id=7), 3) != []


def test_what_many_responses_say_costs_no_more_than_what_one_says() -> None:
    """The same run of tokens in a thousand texts leaves a bounded number of places to look at."""
    past = Past(3, 10**6)
    for _ in range(1000):
        past.add([1, 2, 3, 4, 5])
    assert len(past.index.find([1, 2, 3])) <= RECENT
    index = Index((1, 2))
    index.add([1] * 500, 0, 500)
    assert len(index.find([1, 1, 1])) <= RECENT


def test_a_dropped_text_leaves_nothing_behind() -> None:
    past = Past(3, 20)
    for i in range(50):
        past.add(list(range(10 * i, 10 * i + 10)))
    assert past.tokens <= 20
    assert sum(len(places) for places in past.index._places.values()) <= 20


def test_an_archive_finds_what_an_index_finds() -> None:
    source = random.Random(3)
    texts = [[source.randrange(6) for _ in range(source.randint(1, 60))] for _ in range(30)]
    index = Index([3])
    for known in texts:
        index.add(known, 0, len(known))
    tokens = np.array([token for known in texts for token in known], dtype=np.int32)
    archive = Archive(3, tokens, np.array([len(known) for known in texts], dtype=np.int32))
    assert not Archive(3, tokens[:0], tokens[:0]).find([1, 2, 3]) and not archive.find([1, 2, 99])
    seen = 0
    for _ in range(300):
        context = [source.randrange(7) for _ in range(source.randint(0, 9))]
        found, expected = (
            [(length, among[at]) for among, at, length in where.find(context)] for where in (archive, index)
        )
        assert found == expected
        seen += len(found)
    assert seen > 300
    path: tuple[int, ...] = ()
    walk = Walk(texts[0][:4], [archive])
    for _ in range(80):  # never out of one text into the next
        tokens_here = [among[at] for among, at, _ in walk.at(path)]
        assert SEPARATOR not in tokens_here
        path = (*path, tokens_here[0] if tokens_here else 0)


def test_the_next_turn_of_a_conversation_goes_on_with_its_text() -> None:
    past = Past(3, 100)
    past.add([1, 2, 3, 4, 5])
    past.add([9, 8, 7])
    past.add([1, 2, 3, 4, 5, 6, 7, 8])
    past.add([1, 2, 3, 4, 6])  # begins alike, and goes on otherwise
    assert past.texts() == [[9, 8, 7], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 6]] and past.tokens == 16
    assert [(text[at], n) for text, at, n in past.index.find([3, 4, 5])] == [(6, 3)], "3 4 5 has a sequel now"
    assert [text[at] for text, at, _ in past.index.find([0, 5, 6, 7])] == [8]
    for i in range(40):
        past.add(list(range(10 * i, 10 * i + 10)))
    assert past.tokens <= 100 and len(past.texts()) == 10


def test_recycling_is_right_on_the_second_pass_over_a_text() -> None:
    """A target that looks at the last token alone: what it took after each is all there is to know."""
    target = table_target()
    target.table[1:] = 0
    drafter = SearchDrafter({"recycling": RecyclingSource(VOCAB)})
    sampling = Sampling(temperature=0, max_tokens=40, ignore_eos=True)
    first = run(target, drafter, [[5, 9]], [sampling], draft_tokens=8)[0]
    again = run(target, drafter, [[5, 9]], [sampling], draft_tokens=8)[0]
    assert again.token_ids == first.token_ids
    assert again.stats.rounds < first.stats.rounds and again.stats.tokens_per_round > 4


def test_recycling_keeps_what_the_target_said_of_rejected_nodes_too() -> None:
    target = table_target()
    source = RecyclingSource(VOCAB)
    run(target, SearchDrafter({"": source}), [[3, 4]], [Sampling(temperature=0, max_tokens=3, ignore_eos=True)])
    likeliest = int(target.logits([3, 4]).argmax())
    for known in (source.known.after(4), source.known.after_pair(3, 4)):
        assert likeliest in [token for token, _ in known] and len(known) == WIDTH + 1
    assert not source.known.after(23) and not source.known.after_pair(9, 4)


def test_recycling_listens_to_a_few_of_many_requests_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those without drafts; whoever has some is always listened to."""
    source, heard = RecyclingSource(VOCAB), []
    learn = source.learn
    monkeypatch.setattr(source, "learn", lambda seq, pairs, lines: (heard.append(seq.id), learn(seq, pairs, lines)))
    asks = [Sampling(temperature=0, max_tokens=20, ignore_eos=True, draft_tokens=n) for n in (0, 0, 3, 0, 0, 0)]
    target = table_target()
    target.table[1:] = 0  # a cycle, which it knows soon
    done = run(target, SearchDrafter({"": source}), [[3, n] for n in range(6)], asks, draft_tokens=8)
    assert done[2].stats.drafted > 0 and done[2].stats.rounds < 20
    ids = sorted(set(heard))
    assert heard.count(ids[2]) >= 0.7 * done[2].stats.rounds, "but not in every round before it had drafts"
    assert all(6 <= heard.count(id) <= 10 for id in ids[:2] + ids[3:])


@pytest.mark.parametrize("kind", [table_target, tiny_llama])
def test_the_warm_start_is_what_the_target_says_of_each_token(kind: object) -> None:
    target = kind()  # type: ignore[operator]
    cache = Cache(64, 2, 64)
    target.attach(cache, "target")
    seen: list[tuple[int, int]] = []
    with torch.inference_mode():
        lines = warm_successors(target, cache, lambda done, total: seen.append((done, total)))
    cache.check()
    assert cache.available == 64 and seen[-1] == (VOCAB, VOCAB)
    for token in (0, 7, 23):
        alone = run(target, NoDrafter(), [[0, token]], [Sampling(temperature=0, max_tokens=1, ignore_eos=True)])[0]
        tokens = lines[token, 0].tolist()
        assert tokens[0] == NONE and tokens[1] == alone.token_ids[0]
        assert len(set(tokens)) == WIDTH + 1


def lines_of(source: random.Random, count: int) -> np.ndarray:
    return successors(*top_tokens(torch.tensor([[source.random() for _ in range(VOCAB)] for _ in range(count)]), WIDTH))


def test_what_was_learnt_is_saved_whole_and_read_only_if_it_fits(tmp_path: Path) -> None:
    folder, source = tmp_path / "deep", random.Random(1)
    recycling, suffix = RecyclingSource(VOCAB), SuffixSource()
    recycling.known.put([(-1, 3), (3, 4), (4, 3)], lines_of(source, 3))
    for i, tokens in enumerate([[1, 2, 3, 4, 5, 6], [7, 8, 9, 1, 2]]):
        seq = text(tokens, id=i, prompt=2)
        suffix.view(seq)
        suffix.forget(seq)
    for part in (recycling, suffix):
        part.save(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["past.npz", "successors.npz"]
    again, past = RecyclingSource(VOCAB), SuffixSource()
    for part in (again, past):
        part.load(folder)
    for before, last in [(3, 4), (4, 3), (0, 3), (0, 0)]:
        assert again.known.after(last) == recycling.known.after(last)
        assert again.known.after_pair(before, last) == recycling.known.after_pair(before, last)
    assert proposed(SearchDrafter({"": past}), text([20, 2, 3, 4]), 2) == [(5,), (5, 6)]
    smaller = RecyclingSource(VOCAB - 1)
    smaller.load(folder)
    assert not smaller.known.after(4), "another vocabulary"
    for name in ("past.npz", "successors.npz"):
        (folder / name).write_bytes((folder / name).read_bytes()[:-97])
    cut, cut_past = RecyclingSource(VOCAB), SuffixSource()
    for part in (cut, cut_past):
        part.load(folder)
    assert not cut.known.after(4) and not proposed(SearchDrafter({"": cut_past}), text([20, 2, 3, 4]), 2)


def test_only_so_many_pairs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycling_module, "PAIRS", 5)
    known, source = Successors(VOCAB), random.Random(1)
    for last in range(12):
        known.put([(1, last)], lines_of(source, 1))
    assert len(known._place) == len(known._pairs) == 5
    for last in range(12):  # each token alone, and the latest pairs
        assert len(known.after(last)) == WIDTH + 1
        assert len(known.after_pair(1, last)) == (WIDTH + 1 if last >= 7 else 0)


def tokens_of(guesses: Sequence[Guess]) -> list[int]:
    return [token for token, _ in guesses]


def test_a_request_hears_its_own_rows_first_then_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    source, mine, other, third = RecyclingSource(VOCAB), text([1, 3], 1), text([1, 3], 2), text([1, 3], 3)
    random_ = random.Random(1)
    said = [lines_of(random_, 1) for _ in range(2)]
    for seq, line in zip((mine, other), said, strict=True):
        source.learn(seq, [(1, 3)], line)
    own, others = (line[0, 0].tolist() for line in said)
    assert tokens_of(source.view(mine).guesses(())) == own + own
    assert tokens_of(source.view(third).guesses(())) == others + others, "the latest of all"
    kinds = [{kind // KINDS for _, kind in source.view(seq).guesses(())} for seq in (mine, third)]
    assert kinds == [{0, 1}, {2, 3}]
    assert tokens_of(source.view(third).guesses((1, 3))) == others + others
    assert tokens_of(source.view(third).guesses((2, 3))) == others, "the pair is another"
    source.forget(mine)
    assert tokens_of(source.view(mine).guesses(())) == others + others
    monkeypatch.setattr(recycling_module, "OWN", 6)
    for last in range(10):
        source.learn(other, [(1, last)], said[0])
    assert list(source._own[2]) == [7, (1, 7), 8, (1, 8), 9, (1, 9)]


def test_the_warm_start_is_not_overwritten_by_texts_in_use() -> None:
    source, seq = RecyclingSource(VOCAB), text([1, 3])
    first, second = lines_of(random.Random(1), 1), lines_of(random.Random(2), 1)
    source.known.put([(-1, 3)], first)
    source.known.fixed[3] = True
    source.learn(seq, [(1, 3), (1, 4)], np.concatenate((second, second)))
    assert tokens_of(source.known.after(3)) == first[0, 0].tolist()
    assert tokens_of(source.known.after(4)) == second[0, 0].tolist()
    assert tokens_of(source.view(seq).guesses(())) == 2 * second[0, 0].tolist()


def test_a_private_request_leaves_nothing_and_hears_nothing_of_other_texts() -> None:
    target, how = table_target(), Sampling(temperature=0, max_tokens=30, ignore_eos=True)
    recycling, suffix = RecyclingSource(VOCAB), SuffixSource()
    drafter = SearchDrafter({"recycling": recycling, "suffix": suffix})
    private = replace(how, private=True)
    first = run(target, drafter, [[3, 4]], [private])[0]
    assert (recycling.known.of_token == -1).all() and not suffix._past.texts()
    again = run(target, drafter, [[3, 4]], [private])[0]
    assert again.stats.rounds == first.stats.rounds
    alone = SearchDrafter({"suffix": SuffixSource()})
    open_rounds = [run(target, alone, [[3, 4]], [how])[0].stats.rounds for _ in range(2)]
    assert open_rounds[1] < open_rounds[0]
    assert run(target, alone, [[3, 4]], [private])[0].stats.rounds > open_rounds[1] + 5


def test_top_tokens_order_and_ties() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 40, (7, 1003), generator=generator).float()  # many ties
    expected = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :8].int().numpy()
    for of in (logits, logits.double()):
        tokens, values = top_tokens(of, 8)
        assert (tokens == expected).all()
        assert (values == np.take_along_axis(logits.numpy(), expected, axis=1)).all()
    few = logits[:, :5].contiguous()
    assert (top_tokens(few, 8)[0] == np.argsort(-few.numpy(), kind="stable")).all()


def test_the_best_member_is_not_lost_in_a_mixture() -> None:
    """On a text that n-grams know well, the mixture needs about as few rounds although it has more to choose from."""
    target = table_target()
    prompt = [1, 2, 3, 4, 5, 6] * 4
    sampling = Sampling(temperature=0, max_tokens=40, ignore_eos=True)
    sources: dict[str, dict[str, Source]] = {
        "ngram": {"ngram": NgramSource()},
        "mixed": {"ngram": NgramSource(), "suffix": SuffixSource(0), "recycling": RecyclingSource(VOCAB)},
    }
    rounds = {k: run(target, SearchDrafter(v), [prompt], [sampling])[0].stats.rounds for k, v in sources.items()}
    assert rounds["mixed"] <= rounds["ngram"] + 1 < 40


def test_names_are_joined_or_refused_in_one_sentence() -> None:
    check("suffix+recycling+ngram", False)
    for name, message in {
        "suffix+none": "'none' cannot be joined",
        "suffix+model": "needs draft_model",
        "suffix+suffix": "names a member twice",
        "suffix+magic": "drafter 'magic' is not one of",
        "suffix+": "drafter '' is not one of",
    }.items():
        with pytest.raises(ValueError, match=message):
            check(name, False)
    with pytest.raises(ValueError, match="no use for a draft_model"):
        check("suffix+recycling", True)
    check("suffix+model", True)
    assert build("suffix+ngram", Parts(table_target(), VOCAB, None, trees=False)).chains
    assert not build("suffix+ngram", Parts(table_target(), VOCAB, None)).chains


def test_a_reset_drafter_knows_no_earlier_answer() -> None:
    """A benchmark that runs a prompt twice must not meet a drafter that knows the answer by heart."""
    target, prompt = table_target(), [3, 4]
    sampling = Sampling(temperature=0, max_tokens=40, ignore_eos=True)
    drafter = SearchDrafter({"suffix": SuffixSource(), "recycling": RecyclingSource(VOCAB)})
    first, known = (run(target, drafter, [prompt], [sampling])[0] for _ in range(2))
    drafter.reset()
    again = run(target, drafter, [prompt], [sampling])[0]
    assert first.token_ids == known.token_ids == again.token_ids
    assert known.stats.rounds < first.stats.rounds == again.stats.rounds


def test_i49_sources_go_on_learning_while_nothing_is_drafted() -> None:
    """Pain I49: after rounds without drafts acceptance collapsed. Twenty such rounds, then drafts as if never off."""
    target, prompt = table_target(), [1, 2, 3, 4, 5, 6] * 4

    class Off(FixedPlanner):
        def __init__(self, rounds: int) -> None:
            super().__init__(6, 1000)
            self.rounds = rounds

        def budgets(self, seqs: Sequence[Seq], rows: int) -> list[int]:
            return [0 if seq.generated < self.rounds else 6 for seq in seqs]

    how = Sampling(temperature=0, max_tokens=60, ignore_eos=True)
    later: list[int] = []
    for rounds in (0, 20):
        drafter = build("suffix+recycling+ngram", Parts(target, VOCAB, None))
        done = run(target, drafter, [prompt], [how], planner=Off(rounds))[0]
        later.append(done.stats.rounds - rounds)
    whole = run(target, build("suffix+recycling+ngram", Parts(target, VOCAB, None)), [prompt], [how])[0]
    assert later[0] == whole.stats.rounds and later[1] <= whole.stats.rounds * 40 / 60 + 2


def test_i50_a_bad_stretch_does_not_turn_it_off_for_good() -> None:
    """Pain I50: low acceptance ended speculation. After 300 wrong guesses of a source it is right again, and used."""
    one = Scripted([0.5], {(): [(5, 0)], (5,): [(5, 0)], (5, 5): [(5, 0)]})
    drafter, seq = SearchDrafter({"one": one}), text([1])
    for came in [7] * 300 + [5] * 200:
        assert proposed(drafter, seq, 3), "always worth a node of those there are"
        seq.tokens.append(came)
        drafter._learn(drafter._trees.pop(seq.id), seq, 3)
        if came == 7 and len(seq.tokens) == 301:
            assert drafter._chances.of([(5, 0)])[5] < 0.1
    assert drafter._chances.of([(5, 0), (5, 1)])[5] > 0.8, "a token that the source names and that was said lately"
