"""Every architecture computes what transformers computes: in chunks, in batches and in trees."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from foretell import kernels
from foretell.models.open import open_model
from tests.models.drive import CUDA, NO_TREE, Driver, Tree, paths
from tests.models.test_config import CLASSES

NATIVE = pytest.mark.skipif(kernels.library() is None, reason="no native kernels: there is no C++ compiler here")
SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "llama-gqa-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 3}),
    "llama-rope-llama3": ("Llama", {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}),
    "llama-rope-llama3-old": ("Llama", {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}),
    "llama-rope-linear": ("Llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}),
    "llama-rope-yarn": ("Llama", {"rope_parameters": {"rope_theta": 1e4, **YARN}}),
    "llama-rope-yarn-old": ("Llama", {"rope_parameters": {"rope_theta": 1e4, **YARN}}),
    "llama-head-24": ("Llama", {"head_dim": 24, "num_key_value_heads": 1}),
    "smollm2": ("Llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144, "head_dim": None}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 10, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-window": ("Qwen3", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}),
}
BACKENDS = [
    pytest.param("native", "float32", id="native-float32", marks=NATIVE),
    pytest.param("torch", "float32", id="torch-float32"),
    pytest.param("torch", "float64", id="torch-float64"),
    pytest.param("blocks", "float32", id="blocks-float32"),
    pytest.param("cuda", "float32", id="cuda-float32", marks=CUDA),
]


@dataclass(frozen=True)
class Case:
    folder: Path
    model: PreTrainedModel  # what transformers makes of the folder

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        """[T, V] after each of the tokens."""
        found: Tensor = self.model(torch.tensor([tokens])).logits[0]
        return found


def save(folder: Path, name: str) -> None:
    family, settings = CASES[name]
    torch.manual_seed(len(name))
    config = CLASSES[f"{family}ForCausalLM"](**{**SIZES, **settings})
    model = AutoModelForCausalLM.from_config(config)
    for name_, parameter in model.named_parameters():  # the usual beginning, tiny weights, hides what attention does
        spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
        parameter.data.normal_(float("norm" in name_), spread)
    model.save_pretrained(folder, max_shard_size="50KB" if len(name) % 2 else "1GB")
    if name.endswith("-old"):  # the generation of config.json before transformers 5
        path = folder / "config.json"
        written = json.loads(path.read_text())
        rope = written.pop("rope_parameters")
        written |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": written.pop("dtype")}
        path.write_text(json.dumps(written))


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("model")
    save(folder, request.param)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return Case(folder, model.eval())


def drive(case: Case, backend: str, dtype: str) -> Driver:
    if backend == "cuda":
        opened = open_model(case.folder, device="cuda", dtype=dtype)
        assert opened.target.backend.startswith("cuda-")
    elif case.model.config.head_dim % 16 and backend == "native":  # the kernels cannot, so PyTorch takes over
        opened = open_model(case.folder, dtype=dtype, threads=1)
        assert opened.target.backend == "torch"
    else:
        opened = open_model(case.folder, backend=backend, dtype=dtype, threads=1)
        assert opened.target.backend.startswith(backend)
    assert opened.target.exact and opened.text is None
    return Driver(opened.target, slots=400)


def some_tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(100), k=count)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_chunks_batches_and_trees(case: Case, backend: str, dtype: str) -> None:
    driver = drive(case, backend, dtype)
    long, short = some_tokens(1, 75), some_tokens(2, 13)
    _, whole = driver.prefill(long, [75])
    assert_close(whole, case.logits(long))
    a, ragged = driver.prefill(long, [1, 9, 30, 2, 32])
    assert_close(ragged, case.logits(long)[:74])
    b = driver.start(short)
    tree: Tree = ([5, 9, 9, 41, 7, 5, 63], [-1, -1, 1, 0, 2, 2, 4])
    roots = driver.forward([a, b], [1, 13], [tree, NO_TREE])
    assert_close(roots[1], case.logits(short))
    assert_close(roots[0][0], case.logits(long)[-1])
    for row, path in zip(roots[0][1:], paths(tree), strict=True):
        assert_close(row, case.logits([*long, *(tree[0][node] for node in path)])[-1])
    driver.commit(a, 1, tree, [1, 2, 4, 6])
    driver.commit(b, 13)
    a.tokens.append(3)
    b.tokens.append(4)
    after = driver.forward([b, a], [1, 1], [([8], [-1]), NO_TREE])
    assert_close(after[0], case.logits([*short, 4, 8])[-2:])
    assert_close(after[1], case.logits([*long, 9, 9, 7, 63, 3])[-1:])


@pytest.mark.parametrize(
    "backend", [pytest.param("native", marks=NATIVE), "torch", "blocks", pytest.param("cuda", marks=CUDA)]
)
def test_bfloat16_is_close(case: Case, backend: str) -> None:
    tokens = some_tokens(3, 40)
    _, found = drive(case, backend, "bfloat16").prefill(tokens, [40])
    wanted = case.logits(tokens)
    assert (found.float() - wanted).square().mean() < 0.01 * wanted.square().mean()


@NATIVE
def test_kernels_asked_for_by_name_must_fit(tmp_path: Path) -> None:
    save(tmp_path, "llama-head-24")
    with pytest.raises(ValueError, match=r"native kernels cannot run torch\.float32 with heads of 24"):
        open_model(tmp_path, dtype="float32", backend="native")
