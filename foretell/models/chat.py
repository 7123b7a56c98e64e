"""A model's chat template: where a folder keeps it, which tokens end a turn, how messages become its text.

Templates are foreign code: they run in jinja2's immutable sandbox. Knows no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from foretell.models.files import read_json, read_text

# Tokens that end a turn; whichever of them a model's template writes ends its text.
END_TOKENS = frozenset(
    "<|im_end|> <|eot_id|> <|eom_id|> <|end|> <end_of_turn> <|end_of_turn|> <|endofturn|> <|end_of_text|> </s>".split()
)


def folder_template(folder: Path) -> str | None:
    """The chat template of a folder, the one named "default" where there are several; None if it has none."""
    if (folder / "chat_template.jinja").exists():
        return read_text(folder / "chat_template.jinja")
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = read_json(folder / name).get("chat_template") if (folder / name).exists() else None
        if isinstance(found, list):
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            found = named.get("default")
        if isinstance(found, str):
            return found
    return None


def end_ids(template: str | None, special: Iterable[tuple[str, int]]) -> list[int]:
    """The ids of the end-of-turn tokens that a template writes out, among a tokenizer's special tokens."""
    return [] if template is None else [i for token, i in special if token in END_TOKENS and token in template]


def token_ids(source: Path, key: str, value: Any) -> list[int]:
    """What a file says under `key`, an id or a list of ids or nothing, as a list; ValueError if it is neither."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ValueError(f"{source}: {key} must be a token id or a list of them, not {value!r}")
    return ids


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; here its body is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML and sorts keys, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=8)
def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment.from_string(template)


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    special_tokens: Mapping[str, str],
) -> str:
    """The prompt for the model's next turn. special_tokens: "bos_token" and the like -> its text.

    ValueError in one sentence if the messages are malformed or the template refuses them.
    """
    plain = [_message(i, message) for i, message in enumerate(messages)]
    if not plain:
        raise ValueError("a conversation needs at least one message")
    try:
        return _compile(template).render(
            **special_tokens,
            messages=plain,
            tools=list(tools) if tools else None,
            documents=None,
            add_generation_prompt=True,
        )
    except Exception as error:  # a template can fail in any way; all of them mean that it does not fit the messages
        raise ValueError(f"the model's chat template does not accept these messages: {error}") from error


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's form of one message in the form that templates expect: text content, tool arguments as objects."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {index} must be a mapping with a role and content, not {message!r}")
    plain = dict(message)
    plain["content"] = _content(index, message)
    calls = plain.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
            raise ValueError(f"tool_calls of message {index} must be a list of objects")
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def _content(index: int, message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("tool_calls"):
        return ""
    if not isinstance(content, list | tuple):
        raise ValueError(f"content of message {index} must be a string, not {content!r}")
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    if any(not isinstance(text, str) for text in texts):
        raise ValueError(f"content of message {index} has a part that is not text")
    return "".join(text for text in texts if text is not None)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except json.JSONDecodeError:
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}
