"""Weights are those of transformers, and no damage to a file goes unnoticed or unnamed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils

from foretell.models.config import inverse_frequencies
from foretell.models.gguf_file import GgufFile
from foretell.models.load import Checkpoint, open_checkpoint, tensor_shapes
from foretell.models.text import load_text
from tests.models.small import CLASSES, SMALL

ARCHITECTURES = [
    ("LlamaForCausalLM", {}),
    ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("MistralForCausalLM", {"head_dim": 8}),
    ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    ("Qwen3ForCausalLM", {"head_dim": 32}),
    ("Qwen3ForCausalLM", {"head_dim": 8, "attention_bias": True}),
]


def make_model(architecture: str = "LlamaForCausalLM", **settings: Any) -> Any:
    torch.manual_seed(0)
    config = CLASSES[architecture](**{**SMALL, "num_hidden_layers": 2, "eos_token_id": 2, **settings})
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # norms begin as ones and biases as zeros, which would hide mistakes
        parameter.data.normal_()
    return model


def weights(model: Any) -> dict[str, torch.Tensor]:
    state = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    return {k: v for k, v in state.items() if k != "lm_head.weight" or not model.config.tie_word_embeddings}


def assert_same(checkpoint: Checkpoint, wanted: dict[str, torch.Tensor]) -> None:
    assert checkpoint.names() >= wanted.keys()
    for name, tensor in wanted.items():
        found = checkpoint.tensor(name)
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), name


# Folders


@pytest.mark.parametrize(("architecture", "settings"), ARCHITECTURES)
def test_folders_hold_what_transformers_saved(tmp_path: Path, architecture: str, settings: dict[str, Any]) -> None:
    model = make_model(architecture, **settings)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config is not None and checkpoint.config.architecture == architecture
    assert tensor_shapes(checkpoint.config) == {name: tuple(t.shape) for name, t in weights(model).items()}
    assert_same(checkpoint, weights(model))
    assert checkpoint.folder_or_file == tmp_path and checkpoint.stop_ids == (2,)
    assert checkpoint.hf_config is not None and checkpoint.hf_config["architectures"] == [architecture]


def test_shards_are_one_model(tmp_path: Path) -> None:
    model = make_model().to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    checkpoint = open_checkpoint(tmp_path)
    assert_same(checkpoint, weights(model))
    assert checkpoint.config is not None and checkpoint.config.dtype == torch.bfloat16
    index = tmp_path / "model.safetensors.index.json"
    where = json.loads(index.read_text())
    where["weight_map"]["model.norm.weight"] = next(
        shard.name for shard in shards if shard.name != where["weight_map"]["model.norm.weight"]
    )
    index.write_text(json.dumps(where))
    assert_refused(tmp_path, "lacks the tensor model.norm.weight")
    index.write_text('{"weight_map": 3}')
    assert_refused(tmp_path, "has no weight_map")
    where["weight_map"]["model.norm.weight"] = shards[-1].name
    index.write_text(json.dumps(where))
    shards[0].unlink()
    assert_refused(tmp_path, f"{shards[0].name} is missing")


def test_dtype_comes_from_the_weights_if_the_config_is_silent(tmp_path: Path) -> None:
    make_model().to(torch.float16).save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", dtype=None)
    config = open_checkpoint(tmp_path).config
    assert config is not None and config.dtype == torch.float16


def test_other_architectures_are_left_to_the_adapter(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GemmaForCausalLM"], "eos_token_id": [1, 106]}')
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config is None and checkpoint.names() == set() and checkpoint.stop_ids == (1, 106)
    assert checkpoint.hf_config == {"architectures": ["GemmaForCausalLM"], "eos_token_id": [1, 106]}
    with pytest.raises(ValueError, match=r"tensor norm\.weight is missing"):
        checkpoint.tensor("norm.weight")


def test_stop_ids_are_gathered_from_all_that_name_them(tmp_path: Path) -> None:
    make_model(eos_token_id=[5, 3]).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    tokens = [("<|im_end|>", 9, True), ("<|eot_id|>", 10, True), ("</s>", 11, False)]
    added = [{"content": text, "id": i, "special": special} for text, i, special in tokens]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert open_checkpoint(tmp_path).stop_ids == (3, 5, 7)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}<|im_end|></s>")
    assert open_checkpoint(tmp_path).stop_ids == (3, 5, 7, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    assert_refused(tmp_path, "generation_config.json: eos_token_id must be a token id")


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def assert_refused(path: Path, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda f: (f / "config.json").write_text("[1]"), "must hold a JSON object"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json is not valid JSON"),
        (lambda f: (f / "generation_config.json").write_text("nul"), "generation_config.json is not valid JSON"),
        (lambda f: change_json(f / "config.json", vocab_size=97), r"embed_tokens.weight has shape \[96, 64\]"),
        (lambda f: change_json(f / "config.json", num_hidden_layers=3), "tensor layers.2.* is missing"),
        (lambda f: change_json(f / "config.json", hidden_size="64"), "config.json: hidden_size must be"),
        (lambda f: change_json(f / "config.json", rope_parameters={"rope_type": "dynamic"}), "'dynamic'"),
        (lambda f: change_json(f / "config.json", quantization_config={"bits": 4}), "quantised folders"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda f: cut(f / "model.safetensors", 0), "model.safetensors is truncated"),
        (lambda f: cut(f / "model.safetensors", 7), "model.safetensors is truncated"),
        (lambda f: cut(f / "model.safetensors", 500), "model.safetensors is truncated"),
        (lambda f: cut(f / "model.safetensors", -1), "model.safetensors is truncated"),
    ],
)
def test_damaged_folders_are_refused(tmp_path: Path, damage: Callable[[Path], Any], said: str) -> None:
    make_model().save_pretrained(tmp_path)
    damage(tmp_path)
    assert_refused(tmp_path, said)


def test_no_flipped_header_byte_of_safetensors_escapes_as_another_error(tmp_path: Path) -> None:
    make_model(num_hidden_layers=1).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    intact = file.read_bytes()
    header = 8 + int.from_bytes(intact[:8], "little")
    flip_and_open(file, intact, header, tries=400, open_it=lambda: open_checkpoint(tmp_path))


def flip_and_open(file: Path, intact: bytes, header: int, tries: int, open_it: Callable[[], Checkpoint]) -> None:
    """Change one byte at a time; opening and reading must work or raise ValueError."""
    chance, refused = random.Random(0), 0
    for _ in range(tries):
        at, bit = chance.randrange(header), 1 << chance.randrange(8)
        file.write_bytes(intact[:at] + bytes([intact[at] ^ bit]) + intact[at + 1 :])
        try:
            checkpoint = open_it()
            load_text(checkpoint)
            for name in checkpoint.names():
                checkpoint.tensor(name)
        except ValueError as error:
            assert str(file.parent) in str(error), error
            refused += 1
    assert refused > tries // 2


# GGUF


GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("layers."):
        _, layer, rest = stem.split(".", 2)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def interleave(tensor: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to q and k."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(
    path: Path,
    model: Any,
    architecture: str,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
) -> None:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_context_length(512)
    writer.add_rope_freq_base(50000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    letters = [chr(code) for code in range(33, 33 + config.vocab_size - 3)]
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters])
    writer.add_token_types([3] * 3 + [1] * len(letters))
    writer.add_token_merges(["! !"] if "!!" in letters else [])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    for key, value in (metadata or {}).items():
        {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)](key, value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in weights(model).items():
        array, part = tensor.detach().numpy(), name.split(".")[-2]
        if part in heads and "qwen" not in architecture:
            array = interleave(array, heads[part])
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("architecture", "name", "settings"),
    [
        ("llama", "LlamaForCausalLM", {}),
        ("llama", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("mistral3", "MistralForCausalLM", {"head_dim": 8}),
        ("qwen2", "Qwen2ForCausalLM", {}),
        ("qwen3", "Qwen3ForCausalLM", {"head_dim": 32, "tie_word_embeddings": True}),
    ],
)
def test_gguf_files_hold_what_went_into_them(
    tmp_path: Path, architecture: str, name: str, settings: dict[str, Any]
) -> None:
    model = make_model(name, **settings)
    write_gguf(tmp_path / "m.gguf", model, architecture)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    config = checkpoint.config
    assert config is not None and config.architecture == name
    assert tensor_shapes(config) == {name: tuple(t.shape) for name, t in weights(model).items()}
    assert checkpoint.names() == weights(model).keys()
    assert_same(checkpoint, weights(model))
    assert (config.rope_theta, config.max_positions, config.vocab_size) == (50000.0, 512, 96)
    assert config.windows == (None, None) and config.tied == model.config.tie_word_embeddings
    assert checkpoint.stop_ids == (0, 2) and checkpoint.hf_config is None


def test_float_types_keep_their_dtype_and_others_become_float32(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    kinds = gguf.GGMLQuantizationType
    for kind in (kinds.F16, kinds.BF16, kinds.Q8_0, kinds.Q4_0):
        writer.add_tensor(kind.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("F32", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "t.gguf")
    exact = torch.from_numpy(values)
    assert torch.equal(file.tensor("F32"), exact)
    assert torch.equal(file.tensor("F16"), exact.half())
    assert torch.equal(file.tensor("BF16"), exact.bfloat16())
    for kind in (kinds.Q8_0, kinds.Q4_0):
        wanted = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        assert file.tensor(kind.name).dtype == file.dtype(kind.name) == torch.float32
        assert torch.equal(file.tensor(kind.name), torch.from_numpy(wanted))


def test_rope_settings_of_gguf(tmp_path: Path) -> None:
    path, model = tmp_path / "m.gguf", make_model(num_hidden_layers=1)
    factors = np.array([1, 1, 2, 2, 4, 4, 8, 8], dtype=np.float32)
    write_gguf(path, model, "llama", extra={"rope_freqs.weight": factors})
    config = open_checkpoint(path).config
    assert config is not None
    plain = 1.0 / 50000.0 ** (torch.arange(0, 16, 2).float() / 16)
    assert torch.equal(inverse_frequencies(config)[0], plain / torch.from_numpy(factors))
    scaling = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    write_gguf(path, model, "llama", {**scaling, "llama.rope.scaling.original_context_length": 128})
    config = open_checkpoint(path).config
    assert config is not None
    assert config.rope_scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    write_gguf(path, model, "llama", scaling, {"rope_freqs.weight": factors})
    assert_refused(path, "rope_freqs.weight together with")
    write_gguf(path, model, "llama", {**scaling, "llama.rope.scaling.attn_factor": 2.0})
    assert_refused(path, "its own attention factor")


def test_gguf_files_that_are_not_the_model_they_say_are_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "m.gguf", make_model(num_hidden_layers=1)
    write_gguf(path, model, "gemma2")
    assert_refused(path, "GGUF architecture 'gemma2' is not one of llama")
    write_gguf(path, model, "llama", {"llama.expert_count": 8})
    assert_refused(path, "mixtures of experts")
    write_gguf(path, model, "llama", {"llama.attention.value_length": 8})
    assert_refused(path, "value_length 8 differs")
    write_gguf(path, model, "llama", {"llama.vocab_size": 95})
    assert_refused(path, r"embed_tokens.weight has shape \[96, 64\]")
    write_gguf(path, model, "llama", extra={"blk.0.ssm_a.weight": np.ones(3, dtype=np.float32)})
    assert_refused(path, "'blk.0.ssm_a.weight' belongs to no known model")
    write_gguf(path, model, "llama", extra={"blk.1.attn_norm.weight": np.ones(64, dtype=np.float32)})
    assert_refused(path, "layers.1.input_layernorm.weight is not part of the model")
    assert_refused(tmp_path / "none.gguf", "cannot be read")


def test_no_flipped_header_byte_of_gguf_escapes_as_another_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, make_model(num_hidden_layers=1), "llama")
    intact, info = path.read_bytes(), GgufFile(path).tensors
    header = min(tensor.offset for tensor in info.values())
    flip_and_open(path, intact, header, tries=2000, open_it=lambda: open_checkpoint(path))


def test_truncated_gguf_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, make_model(num_hidden_layers=1), "llama")
    intact = path.read_bytes()
    for size in [*range(0, 4000, 7), len(intact) // 2, len(intact) - 4]:
        path.write_bytes(intact[:size])
        assert_refused(path, ".")


# The built-in model


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Checkpoint:
    return open_checkpoint(smollm2_path)


def test_the_built_in_model_is_described(smollm2: Checkpoint) -> None:
    config = smollm2.config
    assert config is not None
    assert (config.architecture, config.vocab_size, config.hidden_size) == ("LlamaForCausalLM", 49152, 576)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.tied, config.max_positions, config.rope_theta, config.rope_scaling) == (True, 8192, 1e5, None)
    assert not (config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm)
    assert config.dtype == torch.float32
    assert smollm2.stop_ids == (2,)


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_every_tensor_of_the_built_in_model_equals_transformers(
    smollm2: Checkpoint, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert smollm2.config is not None
    # What from_pretrained(folder, gguf_file=name) does, which refuses to without accelerate.
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CLASSES["LlamaForCausalLM"](**sizes, tie_word_embeddings=True))
    # Only for speed: it asks for the same table of names once a layer.
    monkeypatch.setattr(gguf, "get_tensor_name_map", lru_cache(gguf.get_tensor_name_map))
    loaded = modeling_gguf_pytorch_utils.load_gguf_checkpoint(
        str(smollm2_path), return_tensors=True, model_to_load=model
    )["tensors"]
    wanted = {name.removeprefix("model."): tensor for name, tensor in loaded.items()}
    assert len(wanted) == 272 and smollm2.names() == wanted.keys()
    assert {name: tuple(tensor.shape) for name, tensor in wanted.items()} == tensor_shapes(smollm2.config)
    assert_same(smollm2, wanted)


def test_the_built_in_model_cut_or_changed_is_refused(smollm2: Checkpoint, smollm2_path: Path, tmp_path: Path) -> None:
    assert smollm2.gguf is not None
    header = min(info.offset for info in smollm2.gguf.tensors.values())
    size, path = smollm2_path.stat().st_size, tmp_path / "m.gguf"
    shutil.copy(smollm2_path, path)
    chance = random.Random(1)
    with path.open("r+b") as file:
        for at in [*range(0, 32, 3), *(chance.randrange(header) for _ in range(20))]:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0x81]))
            file.flush()
            try:
                load_text(open_checkpoint(path))
            except ValueError as error:
                assert str(path) in str(error)
            file.seek(at)
            file.write(bytes([byte]))
            file.flush()
        for length in (size - 1, size // 2, header + 1, header - 1, header // 2, 3000, 25, 24, 10, 4, 1, 0):
            file.truncate(length)
            assert_refused(path, ".")
