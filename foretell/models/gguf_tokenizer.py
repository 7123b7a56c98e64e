"""A GGUF file's byte-level BPE tokenizer, rebuilt from the file's own metadata.

Includes the rule that splits text before merging, which the file only names (`tokenizer.ggml.pre`).
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from foretell.models.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4  # in tokenizer.ggml.token_type: special, added but not special

_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = [_ENGLISH + _WORDS + r"\p{N}{1,3}" + _REST]
_QWEN2 = [_ENGLISH + _WORDS + r"\p{N}" + _REST]
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Every rule as the expressions whose matches are set apart, one after the other.
_RULES = {
    "smollm": [r"\p{N}", _GPT2],
    "gpt-2": [_GPT2],
    "qwen2": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    # llama.cpp's own fallback for files that name no rule
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+", r"[0-9][0-9][0-9]"],
}
# What llama.cpp and the original tokenizers do beyond splitting.
_WHOLE_TOKENS_FIRST = frozenset(("llama-bpe", "llama3", "llama-v3"))  # a piece in the vocabulary is not merged anew
_ADDS_BOS = _WHOLE_TOKENS_FIRST
_NORMALISES = frozenset(("qwen2",))  # NFC


def build(file: GgufFile) -> Tokenizer:
    """The tokenizer; ValueError in one sentence if the file has none or one of an unsupported kind."""
    kind = file.metadata.get("tokenizer.ggml.model")
    rule = file.metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or rule not in _RULES:
        raise ValueError(
            f"{file.path}: tokenizer {kind!r} with pre-tokenizer {rule!r} cannot be rebuilt, use a folder of this "
            "model that has a tokenizer.json"
        )
    tokens = file.strings("tokenizer.ggml.tokens")
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in file.strings("tokenizer.ggml.merges"))]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or not tokens:
        raise ValueError(f"{file.path}: its vocabulary is empty or names a token twice")
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule in _WHOLE_TOKENS_FIRST))
    except Exception as error:  # the library raises bare Exception for merges that do not fit the vocabulary
        raise ValueError(f"{file.path}: its tokenizer is damaged: {error}") from error
    if rule in _NORMALISES:
        tokenizer.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _RULES[rule]]
    bytes_as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_as_letters])
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(file, tokenizer, tokens)
    if file.metadata.get("tokenizer.ggml.add_bos_token", rule in _ADDS_BOS):
        bos = file.metadata.get("tokenizer.ggml.bos_token_id")
        if not isinstance(bos, int) or not 0 <= bos < len(tokens):
            raise ValueError(f"{file.path}: it asks for a first token but bos_token_id is {bos!r}")
        tokenizer.post_processor = processors.TemplateProcessing("BOS $A", special_tokens=[("BOS", bos)])
    return tokenizer


def _add_tokens(file: GgufFile, tokenizer: Tokenizer, tokens: Any) -> None:
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(kinds, list) or len(kinds) not in (0, len(tokens)):
        raise ValueError(f"{file.path}: tokenizer.ggml.token_type does not have one entry a token")
    added = {
        special: [AddedToken(tokens[i], normalized=False, special=special) for i, k in enumerate(kinds) if k == kind]
        for special, kind in ((True, _CONTROL), (False, _USER_DEFINED))
    }
    tokenizer.add_special_tokens(added[True])
    tokenizer.add_tokens(added[False])
