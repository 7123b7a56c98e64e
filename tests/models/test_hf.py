"""Models that only transformers knows: the same logits as there, the same answers, and clear refusals."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from foretell import LLM, Sampling
from foretell.models.hf import HFModel
from foretell.models.open import open_model
from foretell.types import Rows
from tests.models.drive import NO_TREE, Driver, Tree, paths

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA = {"num_key_value_heads": 2, "head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {  # learned positions, partial rotary, one head of keys, norms of all kinds
    "gpt2": {},
    "gpt_neox": {},
    "phi": {},
    "gemma": GEMMA,
    "olmo": {},
    "falcon": {},
    "opt": {"ffn_dim": 56, "word_embed_proj_dim": 32},
    "qwen2_moe": {"num_key_value_heads": 2, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers keeps its advice about tiny configurations to itself."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(verbosity)


def save(folder: Path, kind: str, *, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A random model in the folder, in float32, and what transformers makes of it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **settings}))
    for name, parameter in model.named_parameters():
        spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
        parameter.data.normal_(float("norm" in name or "ln_" in name), spread)
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@torch.inference_mode()
def plain(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def some_tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(90), k=count)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", FAMILIES)
def test_chunks_batches_and_trees(tmp_path: Path, kind: str) -> None:
    model = save(tmp_path, kind, **FAMILIES[kind])
    opened = open_model(tmp_path, dtype="float32")
    target = opened.target
    assert (target.backend, target.exact, target.vocab_size, target.max_context) == ("transformers", False, 90, 96)
    assert target.stop_ids == {2} and opened.text is None
    driver = Driver(target, slots=200)
    plane = driver.cache.planes["target"]
    assert target.kv_bytes() == 2 * plane.k[:, 0].numel() * 4
    long, short = some_tokens(1, 83), some_tokens(2, 11)
    _, whole = driver.prefill(long, [83])
    assert_close(whole, plain(model, long))
    a, ragged = driver.prefill(long, [1, 30, 2, 49])
    assert_close(ragged, plain(model, long)[:82])
    b = driver.start(short)
    tree: Tree = ([5, 9, 9, 41, 7, 5, 63, 8, 8, 3, 1, 6, 4, 4], [-1, -1, 1, 0, 2, 2, 4, 6, 6, 7, 7, 9, 9, 12])
    rows = driver.forward([a, b], [1, 11], [tree, NO_TREE])
    assert_close(rows[1], plain(model, short))
    for row, path in zip(rows[0], [[], *paths(tree)], strict=True):
        assert_close(row, plain(model, [*long, *(tree[0][node] for node in path)])[-1])
    driver.commit(a, 1, tree, [1, 2, 4, 6])
    driver.commit(b, 11)
    a.tokens.append(3)
    b.tokens.append(4)
    roots = driver.forward([b, a], [1, 1], [([8], [-1]), NO_TREE], every=False)
    assert_close(roots[0], plain(model, [*short, 4, 8])[-2:])
    assert_close(roots[1], plain(model, [*long, 9, 9, 7, 63, 3])[-1:])


def test_rows_may_go_on_from_rows_of_earlier_passes(tmp_path: Path) -> None:
    """As a draft model's do, level by level; each row has a trail of its own."""
    model = save(tmp_path, "gpt_neox")
    driver = Driver(open_model(tmp_path, dtype="float32").target)
    tokens = some_tokens(3, 12)
    seq, _ = driver.prefill(tokens, [12])
    slots = [slot for slot in range(60) if slot not in driver.cache.committed(seq, 0, 12)]
    first = Rows(
        indptr=torch.tensor([0, 3], dtype=torch.int32),
        tokens=torch.tensor([7, 8, 9]),
        positions=torch.tensor([12, 12, 13]),
        parents=torch.tensor([-1, -1, 0], dtype=torch.int32),
        slots=torch.tensor(slots[:3]),
        want=torch.tensor([2, 0]),
        tables=torch.tensor([seq.table], dtype=torch.int32),
        context=torch.tensor([12], dtype=torch.int32),
    )
    with torch.inference_mode():
        logits = driver.target.forward(first, driver.cache).logits
        assert_close(logits, torch.stack([plain(model, [*tokens, 7, 9])[-1], plain(model, [*tokens, 7])[-1]]))
        second = replace(
            first,
            tokens=torch.tensor([5, 6, 4]),
            positions=torch.tensor([14, 13, 15]),
            parents=torch.tensor([-1, -1, 0], dtype=torch.int32),
            slots=torch.tensor(slots[3:6]),
            want=torch.tensor([0, 1, 2]),
            trail_indptr=torch.tensor([0, 2, 3, 3]),
            trail=torch.tensor([slots[0], slots[2], slots[1]], dtype=torch.int32),
        )
        logits = driver.target.forward(second, driver.cache).logits
    for row, path in zip(logits, ([7, 9, 5], [8, 6], [7, 9, 5, 4]), strict=True):
        assert_close(row, plain(model, [*tokens, *path])[-1])


@pytest.mark.parametrize("kind", ["gpt2", "gemma"])
def test_taps_are_the_inputs_of_layers(tmp_path: Path, kind: str) -> None:
    model = save(tmp_path, kind, **FAMILIES[kind])
    driver = Driver(open_model(tmp_path, dtype="float32").target)
    tokens = some_tokens(4, 9)
    seq = driver.start(tokens)
    driver.cache.reserve(seq, 9)
    rows = Rows(
        indptr=torch.tensor([0, 9], dtype=torch.int32),
        tokens=torch.tensor(tokens),
        positions=torch.arange(9),
        parents=torch.arange(-1, 8, dtype=torch.int32),
        slots=torch.tensor(list(driver.cache.reserved(seq))),
        want=torch.empty(0, dtype=torch.int64),
        tables=torch.tensor([seq.table], dtype=torch.int32),
        context=torch.zeros(1, dtype=torch.int32),
    )
    with torch.inference_mode():
        out = driver.target.forward(rows, driver.cache, taps=(0, 1, 2))
        wanted = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        last = (model.model.norm if kind == "gemma" else model.transformer.ln_f)(out.taps[2])
        with pytest.raises(ValueError, match=r"no layers \[3\] to tap"):
            driver.target.forward(rows, driver.cache, taps=(3,))
    assert out.logits.shape == (0, 90) and sorted(out.taps) == [0, 1, 2]
    for found, layer in ((out.taps[0], 0), (out.taps[1], 1), (last, 2)):
        assert_close(found, wanted[layer][0])


@pytest.mark.parametrize("kind", ["gpt2", "phi"])
def test_answers_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    model = save(tmp_path / "model", kind, **FAMILIES[kind])
    save(tmp_path / "draft", "gpt_neox", seed=1)
    save(tmp_path / "copy", kind, **FAMILIES[kind])
    prompts = [[5, 6, 7, 8] * 4, some_tokens(5, 20), [11]]
    sampling = Sampling(temperature=0, max_tokens=40, ignore_eos=True)
    theirs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, min_new_tokens=40, do_sample=False
        )
        theirs.append(made[0, len(prompt) :].tolist())
    for drafter, draft, accepted in (
        ("none", None, 0),
        ("ngram", None, 1),
        ("model", "draft", 0),
        ("model", "copy", 90),
    ):
        folder = None if draft is None else tmp_path / draft
        llm = LLM(tmp_path / "model", drafter=drafter, draft_model=folder, draft_tokens=4, dtype="float32")
        found = llm.generate(prompts, sampling)
        assert [c.token_ids for c in found] == theirs, (drafter, draft)
        assert sum(c.stats.accepted for c in found) >= accepted
        sampled = llm.generate(prompts, Sampling(seed=3, max_tokens=32, ignore_eos=True))
        if drafter == "none":
            wanted = [c.token_ids for c in sampled]
        assert [c.token_ids for c in sampled] == wanted, (drafter, draft)


def test_dtypes(tmp_path: Path) -> None:
    model = save(tmp_path, "olmo")
    tokens = some_tokens(6, 20)
    for stored, asked, dtype in (
        ("float32", "auto", torch.float32),
        ("bfloat16", "auto", torch.bfloat16),
        ("float16", "auto", torch.bfloat16),
        (None, "auto", torch.float32),
        ("float32", "float64", torch.float64),
    ):
        edit(tmp_path, dtype=stored)
        driver = Driver(open_model(tmp_path, dtype=asked, max_context=32).target)
        assert driver.cache.planes["target"].k.dtype == dtype and driver.target.max_context == 32
        _, found = driver.prefill(tokens, [3, 17])
        off = (found.float() - plain(model, tokens)).abs().max()
        assert found.dtype == dtype and off < (1e-5 if dtype != torch.bfloat16 else 0.3)


# Refusals


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        open_model(folder, **options)
    text = str(caught.value)
    assert "\n" not in text and str(folder) in text
    return text.split(": ", 1)[1]


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("mamba", {}, "MambaForCausalLM keeps a recurrent state"),
        ("rwkv", {}, "RwkvForCausalLM keeps a recurrent state"),
        ("jamba", {}, "JambaForCausalLM keeps a recurrent state"),
        ("qwen3_next", {}, "Qwen3NextForCausalLM keeps a recurrent state"),
        ("lfm2", {"full_attn_idxs": [1]}, "Lfm2ForCausalLM has layers whose cache is not plain keys and values"),
        ("minimax", {}, "MiniMaxForCausalLM has layers whose cache is not plain keys and values"),
        (
            "gemma2",
            {**GEMMA, "sliding_window": 16},
            "Gemma2ForCausalLM attends in a sliding or chunked window",
        ),
        ("gemma3_text", {**GEMMA, "sliding_window": 8}, "Gemma3ForCausalLM attends in a sliding or chunked window"),
        ("phi3", {"sliding_window": 90}, "window beyond 90 tokens, which .* set max_context to 90 or less"),
        ("llama4_text", {"attention_chunk_size": 32}, "Llama4ForCausalLM attends in a sliding or chunked window"),
        ("phi3", {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE}, "in another way beyond 32"),
        (
            "gpt_neo",
            {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
            "GPTNeo.* by the order of its keys",
        ),
        ("t5", {}, "T5ForConditionalGeneration is an encoder-decoder model"),
        ("bart", {}, "BartForCausalLM is an encoder-decoder model"),
        ("vit", {}, "ViTForImageClassification is not a causal language model"),
        ("bert", {"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM is not a causal language model"),
        ("gpt2", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "GPT2LMHeadModel is quantised"),
    ],
)
def test_what_the_configuration_gives_away(tmp_path: Path, kind: str, settings: dict[str, Any], reason: str) -> None:
    """Refused before a weight is read: there are none."""
    written = {"architectures", "quantization_config", "rope_parameters"} & settings.keys()
    config = AutoConfig.for_model(kind, **SIZES | {k: v for k, v in settings.items() if k not in written})
    config.save_pretrained(tmp_path)
    names = {"t5": "T5ForConditionalGeneration", "vit": "ViTForImageClassification", "bart": "BartForCausalLM"}
    name = names.get(kind) or AutoModelForCausalLM._model_mapping[type(config)].__name__
    edit(tmp_path, **{"architectures": [name], **{k: settings[k] for k in written}})
    assert re.search(reason, refusal(tmp_path))


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("bloom", {}, "BloomForCausalLM takes no position ids"),
        ("falcon", {"alibi": True}, "FalconForCausalLM cannot run with foretell's cache"),
        ("bert", {}, "BertLMHeadModel computes something else for a tree of tokens than for a plain text"),
        (
            "deepseek_v3",
            DEEPSEEK,
            "DeepseekV3ForCausalLM has keys and values that differ in shape",
        ),
    ],
)
def test_what_only_running_shows(tmp_path: Path, kind: str, settings: dict[str, Any], reason: str) -> None:
    save(tmp_path, kind, **settings)
    assert reason in refusal(tmp_path)


def test_windows_that_no_text_outgrows_are_fine(tmp_path: Path) -> None:
    model = save(tmp_path, "gemma2", **GEMMA, sliding_window=24)
    assert "set max_context to 24 or less" in refusal(tmp_path)
    tokens = some_tokens(7, 24)
    _, found = Driver(open_model(tmp_path, max_context=24).target).prefill(tokens, [10, 14])
    assert_close(found, plain(model, tokens))


def test_other_things_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "gpt2")
    assert "max_context 97 is more than the model's 96 positions" in str(
        pytest.raises(ValueError, open_model, tmp_path, max_context=97).value
    )
    assert refusal(tmp_path, backend="native") == "backend 'native' cannot run this architecture"
    edit(tmp_path, model_type="shiny", architectures=["ShinyForCausalLM"])
    assert refusal(tmp_path) == "ShinyForCausalLM is of model_type 'shiny', which transformers does not know"
    edit(tmp_path, auto_map={"AutoModelForCausalLM": "shiny.ShinyForCausalLM"})
    assert "brings code of its own (trust_remote_code)" in refusal(tmp_path)
    edit(tmp_path, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    assert open_model(tmp_path).target.backend == "transformers"  # its code is not needed, so it is not run
    edit(tmp_path, n_layer=3)
    assert refusal(tmp_path).startswith("tensor transformer.h.2.")
    edit(tmp_path, n_layer=2, n_embd=64)
    assert "GPT2LMHeadModel cannot be loaded by transformers" in refusal(tmp_path)
    edit(tmp_path, n_embd="wide")
    assert "config.json that transformers cannot read" in refusal(tmp_path)
    edit(tmp_path, n_embd=32)
    (tmp_path / "model.safetensors").unlink()
    assert "GPT2LMHeadModel cannot be loaded by transformers" in refusal(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refusal(tmp_path) == "GPT2LMHeadModel needs the transformers library: pip install foretell[hf]"


def test_threads_are_those_asked_for(tmp_path: Path) -> None:
    save(tmp_path, "gpt2")
    assert isinstance(open_model(tmp_path, threads=2).target, HFModel)
    assert torch.get_num_threads() == 2
