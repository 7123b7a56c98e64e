"""`foretell chat`: a conversation, streamed, in a terminal or through a pipe."""

from __future__ import annotations

import contextlib
import select
import sys
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from foretell.bench.run import Run
from foretell.cli import report
from foretell.cli.command import verb
from foretell.cli.options import ModelOptions, SamplingOptions
from foretell.cli.terminal import LEGEND, Interrupt, Writer, colours, load
from foretell.engine.llm import LLM
from foretell.types import Sampling

HELP = """\
/reset           forget the conversation
/system TEXT     set the system message, and forget the conversation
/temperature X   0 always takes the likeliest token
/stats           figures of the last answer
/exit            leave; so do Ctrl-D and, while nothing is being written, Ctrl-C
Ctrl-C while an answer is being written stops it and keeps what is there."""
PASTE_S = 0.05  # lines that are there within this time after one another were pasted, and are one message


@dataclass
class ChatOptions(SamplingOptions):
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", metavar="N", help="Length of an answer at most.")] = (
        1024
    )
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None

    def sampling(self, **more: object) -> Sampling:
        options = dict(vars(self))
        del options["system"]
        return SamplingOptions(**options).sampling(**more)


@verb
def command(model: ModelOptions, options: ChatOptions) -> None:
    """Talk with a model.

    /help lists what can be typed besides messages.

    Examples:

    \b
      foretell chat
      foretell chat --system "Answer in one sentence." --temperature 0.7
      printf 'Hello!\\nAnd in French?\\n' | foretell chat
    """
    sampling = options.sampling()
    llm = load(model)
    if llm.tokenizer is None or llm.tokenizer.template is None:
        raise ValueError("this model has no chat template: use `foretell generate --raw`")
    Chat(llm, sampling, model.rule, options.system).loop()


class Chat:
    def __init__(self, llm: LLM, sampling: Sampling, rule: str, system: str | None) -> None:
        self.llm, self.sampling, self.rule = llm, sampling, rule
        self.colour = colours()
        self.terminal = sys.stdin.isatty()
        self.last: Run | None = None
        self.messages: list[dict[str, str]] = []
        self._reset(system)

    def loop(self) -> None:
        """Until the input ends or /exit."""
        if self.terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # from now on `input` has line editing and a history
            _tell(f"{self.llm.name}; /help for help, /exit to leave")
            if self.colour and self.llm.drafter.draft_tokens:
                _tell(LEGEND)
        while (line := self._read()) is not None:
            name, _, argument = line.strip().partition(" ")
            if name == "/exit":
                return
            if name.startswith("/") and "\n" not in line:
                self._command(name, argument.strip())
            elif line.strip():
                self._answer(line)

    def _read(self) -> str | None:
        """The next message, pasted lines together; None at the end of the input or on Ctrl-C."""
        try:
            if not self.terminal:
                line = sys.stdin.readline()
                return line.rstrip("\n") if line else None
            lines = [input("> ")]
            while select.select([sys.stdin], [], [], PASTE_S)[0]:
                lines.append(input())
            return "\n".join(lines)
        except (EOFError, KeyboardInterrupt):
            print()
            return None

    def _command(self, name: str, argument: str) -> None:
        if name == "/help":
            _tell(HELP)
        elif name == "/reset":
            self._reset(self.system)
        elif name == "/system":
            self._reset(argument or None)
        elif name == "/stats":
            if self.last is None:
                _tell("nothing has been answered yet")
            else:
                report.show_stats(self.last, self.llm, self.rule)
        elif name == "/temperature":
            try:
                self.sampling = replace(self.sampling, temperature=float(argument))
            except ValueError as error:
                _tell(f"/temperature takes a number of at least 0: {error}")
        else:
            _tell(f"there is no {name}; /help lists what there is")

    def _reset(self, system: str | None) -> None:
        self.system = system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def _answer(self, text: str) -> None:
        """Answer one message; it and what came of the answer join the conversation, unless it does not fit."""
        asked = [*self.messages, {"role": "user", "content": text}]
        with Interrupt() as interrupt:
            try:
                run = Run(self.llm, self.llm.encode_chat(asked), self.sampling, stopping=interrupt)
            except ValueError as error:
                _tell(f"not sent: {error}; the conversation is kept, /reset starts a new one")
                return
            writer = Writer(self.llm.tokenizer, self.colour)
            for event in run.events():
                writer.write(event)
            writer.end()
        completion = run.completion
        self.last = run
        self.messages = [*asked, {"role": "assistant", "content": completion.text}]
        if completion.finish_reason == "length" and self.terminal:
            _tell(f"(cut after {len(completion.token_ids)} tokens)")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
