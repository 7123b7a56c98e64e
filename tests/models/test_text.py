"""Text becomes the model's own tokens and comes back whole, piece by piece as well as at once."""

from __future__ import annotations

import json
import random
import string
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from jinja2 import Environment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from foretell.models.gguf_file import GgufFile
from foretell.models.load import Checkpoint, open_checkpoint
from foretell.models.text import Detokenizer, Text, load_text

SAMPLES = [
    "The capital of France is",
    "In 2024, 1234567 people paid $3.50.\n\n\tAnd 3²=9, ½, Ⅷ, ٣٤.",
    "naïve café, Ångström, e\u0301 (combining), Zażółć gęślą jaźń",
    "日本語のテキスト、한국어, العربية, हिन्दी, ไทย",
    "👩‍👩‍👧‍👦 👍🏽 🇫🇷 🏳️‍🌈 ✈️",
    "def f(x):\r\n    return {'a': [1, 2], \"b\": None}  # it's, we'll, I'D\n",
    "  two  spaces   three\t\ttabs \n \n ends in space ",
    "a\x00b\x7f\u200b\ufeff\ufffd\U0010ffff",
]


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Text:
    text = load_text(open_checkpoint(smollm2_path))
    assert text is not None
    return text


def pieces(text: Text, ids: Sequence[int]) -> str:
    """Decode one id at a time; what was given out must be a prefix of the whole at every step."""
    detokenizer, whole, given = Detokenizer(text), text.decode(ids), ""
    for i in ids:
        given += detokenizer.add([i])
        assert whole.startswith(given) and detokenizer.text == given
    given += detokenizer.finish()
    assert detokenizer.text == given
    return given


# The built-in model


def test_encoding_is_that_of_the_original_tokenizer(smollm2: Text) -> None:
    assert smollm2.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert smollm2.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert smollm2.encode("Café déjà vu.") == [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]
    assert smollm2.encode("  multiple   spaces") == [216, 2701, 256, 5600]
    assert smollm2.encode("") == []


def test_digits_stand_alone(smollm2: Text) -> None:
    ids = smollm2.encode("x = 31415926 or 2,718")
    digits = [smollm2.token(i) for i in ids if any(c.isdigit() for c in smollm2.token(i))]
    assert digits == list("314159262718")


def test_digit_rule_equals_the_original_one(smollm2: Text) -> None:
    """The original is written with other parts of the library: Digits, then ByteLevel with its built-in expression."""
    original = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ours = smollm2.tokenizer.pre_tokenizer
    chance = random.Random(0)
    letters = string.printable + "é½Ⅷ٣e\u0301日👍\u00a0\u2003ǅ"
    for text in [*SAMPLES, *("".join(chance.choices(letters, k=40)) for _ in range(500))]:
        wanted = [piece for piece, _ in original.pre_tokenize_str(text)]
        assert [piece for piece, _ in ours.pre_tokenize_str(text)] == wanted


def test_special_tokens(smollm2: Text) -> None:
    vocab = smollm2.vocab()
    assert len(vocab) == 49152 and vocab[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    named = {name: vocab.index(token) for name, token in smollm2.special_tokens.items()}
    assert named == {"bos_token": 1, "eos_token": 2, "pad_token": 2, "unk_token": 0}
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.encode("<|im_start|>hi<|im_end|>") == [1, *smollm2.encode("hi"), 2]
    assert smollm2.decode([1, *smollm2.encode("hi"), 2]) == "hi"
    assert smollm2.decode([1, *smollm2.encode("hi"), 2], skip_special=False) == "<|im_start|>hi<|im_end|>"
    assert smollm2.token(504) == "The" and smollm2.token(314) == "Ġis" and smollm2.token(10**6) == ""


@pytest.mark.parametrize("sample", SAMPLES)
def test_round_trip_in_pieces(smollm2: Text, sample: str) -> None:
    ids = smollm2.encode(sample)
    assert smollm2.decode(ids) == sample
    assert pieces(smollm2, ids) == sample
    for at in range(len(ids) + 1):
        detokenizer = Detokenizer(smollm2)
        assert detokenizer.add(ids[:at]) + detokenizer.add(ids[at:]) + detokenizer.finish() == sample


def test_every_token_alone(smollm2: Text) -> None:
    for i in range(len(smollm2.vocab())):
        detokenizer = Detokenizer(smollm2)
        assert detokenizer.add([i]) + detokenizer.finish() == smollm2.decode([i])


def test_random_ids_come_out_as_decode_says(smollm2: Text) -> None:
    """Random ids are mostly invalid UTF-8: the first 300 hold all single bytes and the special tokens."""
    chance = random.Random(0)
    for _ in range(1000):
        ids = [chance.randrange(chance.choice([300, 49152, 49400])) for _ in range(chance.randrange(1, 50))]
        assert pieces(smollm2, ids) == smollm2.decode(ids)


def test_an_incomplete_character_waits(smollm2: Text) -> None:
    ids = smollm2.encode("\U0001fae0")  # its bytes are several tokens
    assert len(ids) > 1
    detokenizer = Detokenizer(smollm2)
    assert [detokenizer.add([i]) for i in ids] == [""] * (len(ids) - 1) + ["\U0001fae0"]
    assert detokenizer.finish() == ""
    cut = Detokenizer(smollm2)
    assert (cut.add(ids[:-1]), cut.finish(), cut.text) == ("", "\ufffd", "\ufffd")


def test_work_per_token_does_not_grow(smollm2: Text) -> None:
    """10 times the tokens may take at most 30 times as long; work that grew with the text would take 100 times."""
    ids = smollm2.encode("All work and no play 👍🏽. ") * 200

    def seconds(ids: list[int]) -> float:
        detokenizer, begin = Detokenizer(smollm2), time.perf_counter()
        for i in ids:
            detokenizer.add([i])
        return time.perf_counter() - begin

    short = min(seconds(ids) for _ in range(3))
    assert seconds(ids * 10) < 30 * short


def test_chat_of_the_built_in_model(smollm2: Text) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 12 + 30?"},
        {"role": "assistant", "content": "42"},
        {"role": "user", "content": "Thanks 👍"},
    ]
    template = smollm2.template
    assert template is not None
    plain = Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    wanted = plain.render(messages=messages, add_generation_prompt=True)
    assert smollm2.chat_text(messages) == wanted
    assert wanted.endswith("<|im_start|>user\nThanks 👍<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm2.chat(messages)
    assert smollm2.decode(ids, skip_special=False) == wanted
    assert ids.count(1) == 5 and ids.count(2) == 4 and ids[0] == 1


def test_default_system_message(smollm2: Text) -> None:
    assert smollm2.chat_text([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "at least one message"),
        (["hi"], "message 0 must be a mapping"),
        ([{"content": "hi"}], "message 0 must be a mapping with a role"),
        ([{"role": "user"}], "content of message 0 must be a string"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": 3}], "content of message 1"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a part that is not text"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "tool_calls of message 0"),
    ],
)
def test_malformed_messages_say_what_is_wrong(smollm2: Text, messages: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        smollm2.chat(messages)


def test_content_in_parts_is_joined(smollm2: Text) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    whole = [{"role": "user", "content": "ab"}]
    assert smollm2.chat([{"role": "user", "content": parts}]) == smollm2.chat(whole)


# Templates


def with_template(text: Text, template: str | None) -> Text:
    return Text(text.tokenizer, template, text.special_tokens)


def test_a_model_without_a_template_says_so(smollm2: Text) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        with_template(smollm2, None).chat([{"role": "user", "content": "hi"}])


USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<|im_start|><|im_end|>"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ tools | tojson }}", '[{"name": "é<b>", "a": 1}]'),
        ("{% for t in tools %}{{ t | tojson(indent=1) }}{% endfor %}", '{\n "name": "é<b>",\n "a": 1\n}'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% if missing is defined %}x{% endif %}{{ add_generation_prompt }}", "True"),
    ],
)
def test_what_templates_may_use(smollm2: Text, template: str, wanted: str) -> None:
    assert with_template(smollm2, template).chat_text(USER, [{"name": "é<b>", "a": 1}]) == wanted


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "does not accept these messages: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "does not accept"),
        ("{{ nothing.at.all }}", "does not accept"),
        ("{% if %}", "does not accept"),
        ("{{ ''.__class__.__mro__ }}", "does not accept"),
        ("{{ messages.append(1) }}", "does not accept"),
    ],
)
def test_templates_that_fail_say_why(smollm2: Text, template: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        with_template(smollm2, template).chat_text(USER)


def test_tool_arguments_reach_the_template_as_objects(smollm2: Text) -> None:
    text = with_template(smollm2, "{{ messages[0].tool_calls[0].function.arguments.x }}|{{ messages[0].content }}")
    for arguments in ('{"x": 3}', {"x": 3}):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        assert text.chat_text([{"role": "assistant", "content": None, "tool_calls": [call]}]) == "3|"
    call = {"type": "function", "function": {"name": "f", "arguments": "not json"}}
    assert text.chat_text([{"role": "assistant", "tool_calls": [call]}]) == "|"


# GGUF tokenizers


QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def gguf_text(tmp_path: Path, pre: str | None, **fields: Any) -> Text:
    """A tokenizer of single bytes, a few merges and three added tokens."""
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    tokens = [*ALPHABET, "12", "123", "1234", "it", "<s>", "</s>", "<tool>", *fields.pop("more", [])]
    writer.add_tokenizer_model(fields.pop("model", "gpt2"))
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(fields.pop("types", [1] * (len(ALPHABET) + 4) + [3, 3, 4]))
    writer.add_token_merges(fields.pop("merges", ["1 2", "12 3", "123 4", "i t"]))
    writer.add_bos_token_id(fields.pop("bos", tokens.index("<s>")))
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    none: dict[str, Any] = {}
    text = load_text(Checkpoint(path, None, None, (), GgufFile(path), {}, none.__getitem__))
    assert text is not None
    return text


def spelled(text: Text, sample: str) -> list[str]:
    return [text.token(i) for i in text.encode(sample)]


@pytest.mark.parametrize(
    ("pre", "digits", "first"),
    [
        ("smollm", ["1", "2", "3", "4"], []),
        ("qwen2", ["1", "2", "3", "4"], []),
        ("gpt-2", ["1234"], []),
        ("llama-bpe", ["123", "4"], ["<s>"]),
        ("llama3", ["123", "4"], ["<s>"]),
        ("default", ["123", "4"], []),
        (None, ["123", "4"], []),
    ],
)
def test_every_rule_splits_numbers_in_its_way(tmp_path: Path, pre: str, digits: list[str], first: list[str]) -> None:
    text = gguf_text(tmp_path, pre)
    assert spelled(text, "1234") == first + digits
    assert spelled(text, "it<tool>it</s>") == [*first, "it", "<tool>", "it", "</s>"]
    assert text.decode(text.encode("it<tool>it</s>")) == "it<tool>it"
    for sample in SAMPLES:
        assert pieces(text, text.encode(sample)) == sample.replace("e\u0301", "é" if pre == "qwen2" else "e\u0301")


def test_llama3_takes_whole_pieces_of_the_vocabulary(tmp_path: Path) -> None:
    more: dict[str, Any] = {"more": ["zz"], "types": [1] * (len(ALPHABET) + 4) + [3, 3, 4, 1]}
    assert spelled(gguf_text(tmp_path, "llama-bpe", **more), "zz") == ["<s>", "zz"]
    assert spelled(gguf_text(tmp_path, "qwen2", **more), "zz") == ["z", "z"]  # no merge leads to it


def test_first_token_is_as_the_file_says(tmp_path: Path) -> None:
    assert spelled(gguf_text(tmp_path, "llama-bpe", add_bos_token=False), "it") == ["it"]
    text = gguf_text(tmp_path, "smollm", add_bos_token=True, chat_template="{{ bos_token }}it")
    assert spelled(text, "it") == ["<s>", "it"]
    assert [text.token(i) for i in text.chat(USER)] == ["<s>", "it"]  # the template's own, not a second one


def test_qwen_rule_equals_the_original_one(tmp_path: Path) -> None:
    split = pre_tokenizers.Split(Regex(QWEN2), "isolated")
    original = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer = gguf_text(tmp_path, "qwen2").tokenizer
    assert isinstance(tokenizer.normalizer, normalizers.NFC)
    for sample in SAMPLES:
        assert tokenizer.pre_tokenizer.pre_tokenize_str(sample) == original.pre_tokenize_str(sample)


@pytest.mark.parametrize(
    ("pre", "fields", "said"),
    [
        ("tekken", {}, "pre-tokenizer 'tekken' cannot be rebuilt, use a folder .* tokenizer.json"),
        ("default", {"model": "llama"}, "tokenizer 'llama' with .* cannot be rebuilt"),
        ("smollm", {"merges": ["1 9999"]}, "its tokenizer is damaged"),
        ("smollm", {"merges": ["12"]}, "its tokenizer is damaged"),
        ("smollm", {"types": [1]}, "token_type does not have one entry a token"),
        ("smollm", {"bos": 10**6, "add_bos_token": True}, "bos_token_id is 1000000"),
        ("smollm", {"more": ["it"], "types": [1] * (len(ALPHABET) + 8)}, "names a token twice"),
    ],
)
def test_unusable_gguf_tokenizers_say_why(tmp_path: Path, pre: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        gguf_text(tmp_path, pre, **fields)
    assert "t.gguf" in str(caught.value)


# Folders


def folder_text(folder: Path) -> Text | None:
    (folder / "config.json").write_text('{"architectures": ["Other"]}')
    return load_text(open_checkpoint(folder))


def sentencepiece_like() -> Tokenizer:
    """As of Llama 2: spaces as ▁, a prefix space, bytes as tokens of their own."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁it", "it", "▁▁", "s", "日", "�"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def test_a_folder_without_a_tokenizer_has_no_text(tmp_path: Path) -> None:
    assert folder_text(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ValueError, match="no tokenizer.json"):
        folder_text(tmp_path)


def test_a_folder_s_tokenizer_and_template(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>", "unk_token": "<unk>"}')
    config = {"bos_token": {"content": "<s>"}, "eos_token": None, "chat_template": "{{ bos_token }}sss{{ eos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    text = folder_text(tmp_path)
    assert text is not None
    assert text.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert spelled(text, "sss") == ["<s>", "▁", "s", "s", "s"]
    assert [text.token(i) for i in text.chat(USER)] == ["<s>", "▁", "s", "s", "s", "</s>"]
    (tmp_path / "chat_template.jinja").write_text("its own file")
    text = folder_text(tmp_path)
    assert text is not None and text.template == "its own file"


def test_templates_with_names(tmp_path: Path) -> None:
    sentencepiece_like().save(str(tmp_path / "tokenizer.json"))
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    text = folder_text(tmp_path)
    assert text is not None and text.template == "b"


def test_damaged_tokenizer_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ValueError, match="tokenizer.json cannot be read"):
        folder_text(tmp_path)
    sentencepiece_like().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("nul")
    with pytest.raises(ValueError, match="tokenizer_config.json is not valid JSON"):
        folder_text(tmp_path)


def test_pieces_of_other_tokenizers_are_exact(tmp_path: Path) -> None:
    """Random ids of a tokenizer whose decoder strips a space, joins words and falls back to bytes."""
    text = Text(sentencepiece_like(), None, {})
    chance, size = random.Random(0), len(text.vocab())
    for _ in range(2000):
        ids = [chance.choice([chance.randrange(size), chance.randrange(259, size)]) for _ in range(12)]
        assert pieces(text, ids) == text.decode(ids), ids
    for sample in ("it 日本 it", "👍🏽its", "  it"):
        assert pieces(text, text.encode(sample)) == text.decode(text.encode(sample)) == sample
