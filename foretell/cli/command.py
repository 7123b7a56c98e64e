"""What every verb shares: options in groups, names from other tools, and errors as one line and an exit code."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, get_type_hints

import typer
from typer.core import TyperCommand

# What other engines' users type, and the name it has here (vLLM, SGLang, llama.cpp, transformers).
ALIASES = {
    "--num-speculative-tokens": "--draft-tokens",
    "--speculative-num-draft-tokens": "--draft-tokens",
    "--draft-max": "--draft-tokens",
    "--draft-n": "--draft-tokens",
    "--spec-draft-n-max": "--draft-tokens",
    "--num-assistant-tokens": "--draft-tokens",
    "--prompt-lookup-num-tokens": "--draft-tokens",
    "--assistant-model": "--draft-model",
    "--speculative-model": "--draft-model",
    "--speculative-draft-model-path": "--draft-model",
    "--spec-draft-model": "--draft-model",
    "--model-draft": "--draft-model",
    "-md": "--draft-model",
    "--n-predict": "--max-tokens",
    "--max-new-tokens": "--max-tokens",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "--max-model-len": "--max-context",
    "--ctx-size": "--max-context",
}


class Command(TyperCommand):
    """A verb that takes the aliases too, and underscores in place of hyphens."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, [*map(_canonical, args[:end]), *args[end:]])


def _canonical(argument: str) -> str:
    name, equals, value = argument.partition("=")
    if name.startswith("--") and not name.startswith("---"):
        name = "--" + name[2:].replace("_", "-")
    elif name not in ALIASES:
        return argument
    return ALIASES.get(name, name) + equals + value


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """A function for typer: each parameter that is a dataclass becomes its fields, and errors become exit codes."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if dataclasses.is_dataclass(hints[name]):
            groups[name] = hints[name]
            parameters += _fields(hints[name])
        else:
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(kind=keyword, annotation=hints[name]))

    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        try:
            function(**values)
        except ValueError as error:
            fail(str(error), 2)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:
            close_stdout()
            raise typer.Exit(141) from None

    call.__doc__, call.__name__ = function.__doc__, function.__name__
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _fields(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    parameters = []
    for field in dataclasses.fields(group):
        default: Any = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        parameters.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name])
        )
    return parameters


def help_alone(context: typer.Context) -> None:
    """For the callback of a group of verbs: its name alone prints its help."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


def fail(reason: str, code: int) -> NoReturn:
    """One line on stderr, and out."""
    print(f"foretell: {' '.join(reason.split())}", file=sys.stderr)
    raise typer.Exit(code)


def close_stdout() -> None:
    """Nobody reads it any more: keep the interpreter from complaining when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
