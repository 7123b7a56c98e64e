"""The terminal: loading with a spinner, text as it comes with accepted drafts in colour, and Ctrl-C between steps."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from foretell.cli.command import fail
from foretell.cli.options import TargetOptions
from foretell.engine.llm import LLM
from foretell.engine.request import Event
from foretell.models import hub
from foretell.models.text import Detokenizer, Text

ACCEPTED, OFF = "\x1b[32m", "\x1b[0m"
LEGEND = f"{ACCEPTED}this colour{OFF}: guessed by the drafter and accepted by the model"
# A model may write anything; to a terminal, control characters other than tab and newline are commands.
_CONTROLS = {code: None for code in (*range(9), *range(11, 32), *range(127, 160))}


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A spinner on stderr that says what goes on; nothing where stderr is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda line: None
        return
    with console.status("") as status:
        yield lambda line: status.update(escape(line))


@contextmanager
def bar() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr, told how much is done, of how much, and what goes on; nothing where it is not a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("", total=None)
        yield lambda done, total, what: shown.update(task, completed=done, total=total, description=escape(what))


def load(options: TargetOptions, **more: Any) -> LLM:
    """The model, fetched first if it is a built-in one that is not here yet. more: arguments of `LLM` beside these; one
    request at once, unless they say otherwise."""
    arguments = {"max_batch": 1, **options.arguments(), **more}
    fetched(options.model, arguments.get("draft_model"))
    with progress() as say:
        say(f"loading {options.model}")
        return LLM(**arguments)


def fetched(*names: str | None) -> None:
    """See to it that the built-in models among these are here."""
    with progress() as say:
        for name in names:
            if name in hub.BUILTIN:
                fetch(name, say)


def fetch(name: str, say: Callable[[str], None]) -> str:
    """Where the built-in model is, once it is there; ends the program with one line if it cannot be had."""
    try:
        return str(hub.fetch(name, say))
    except RuntimeError as error:
        fail(str(error), 1)


def colours() -> bool:
    """Whether stdout is a terminal that wants colours (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Writer:
    """Writes events to stdout as they come. tokenizer None: token ids are written, with spaces between them."""

    def __init__(self, tokenizer: Text | None, colour: bool) -> None:
        self._colour = colour
        self._terminal = sys.stdout.isatty()
        self._tokenizer = tokenizer
        self._pieces = Detokenizer(tokenizer) if tokenizer else None
        self._last = "\n"

    def write(self, event: Event) -> None:
        if self._tokenizer is None:
            parts = [(f"{token} ", drafted) for token, drafted in zip(event.token_ids, event.drafted, strict=True)]
        else:
            parts = self._split(event)
        text = "".join(self._paint(part, drafted) for part, drafted in parts)
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._last = parts[-1][0][-1:] or self._last

    def end(self) -> None:
        """Finish the line."""
        if self._last != "\n":
            sys.stdout.write("\n")
        sys.stdout.flush()

    def _split(self, event: Event) -> list[tuple[str, bool]]:
        """The event's text by token. A stop may have cut it short, and its end may have come with no token."""
        assert self._pieces is not None
        rest, parts = event.text, []
        for token, drafted in zip(event.token_ids, event.drafted, strict=True):
            piece = self._pieces.add([token])[: len(rest)]
            parts.append((piece, drafted))
            rest = rest[len(piece) :]
        return [(piece, drafted) for piece, drafted in [*parts, (rest, False)] if piece]

    def _paint(self, part: str, drafted: bool) -> str:
        if self._terminal:
            part = part.translate(_CONTROLS)
        return f"{ACCEPTED}{part}{OFF}" if drafted and self._colour and part else part


class Interrupt:
    """While entered, Ctrl-C is noted and not raised, so that no step is torn in half; a second one is raised."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __call__(self) -> bool:
        return self.asked

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
