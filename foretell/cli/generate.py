"""`foretell generate`: one prompt, answered once."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from foretell.bench.compare import Comparison, compare
from foretell.bench.run import Run, warm_up
from foretell.cli import report
from foretell.cli.command import fail, verb
from foretell.cli.options import ModelOptions, SamplingOptions
from foretell.cli.terminal import LEGEND, Interrupt, Writer, colours, load, progress
from foretell.engine.llm import LLM, Prompt
from foretell.models.files import read_text
from foretell.types import Sampling


@dataclass
class PromptOptions:
    prompt: Annotated[str, typer.Argument(help="The text to answer or to go on with; - reads it from standard input.")]
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Through the model's chat template, or the prompt as it is; default: chat, if there is a template.",
        ),
    ] = None
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message before the prompt.")] = None
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="The prompt is token ids with spaces or commas between them.")
    ] = False
    prediction: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A text that the answer will be much like, such as the file to change."),
    ] = None

    def predicted(self) -> str | None:
        """The text of --prediction."""
        try:
            return None if self.prediction is None else read_text(self.prediction)
        except ValueError as error:
            raise ValueError(f"--prediction: {error}") from error

    def encoded(self, llm: LLM) -> Prompt:
        """The prompt for `llm`; ValueError if the model cannot take it so."""
        text = sys.stdin.read() if self.prompt == "-" else self.prompt
        if self.token_ids:
            return [_token_id(word) for word in text.replace(",", " ").split()]
        template = llm.tokenizer is not None and llm.tokenizer.template is not None
        chat = self.chat if self.chat is not None else template or self.system is not None
        if not chat:
            if self.system is not None:
                raise ValueError("--system needs --chat: a plain prompt has no system message")
            return text
        if not text.strip():
            raise ValueError("the prompt is empty")
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return llm.encode_chat([*system, {"role": "user", "content": text}])


@dataclass
class OutputOptions:
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout in place of the text.")] = False
    logprobs: Annotated[
        int | None, typer.Option(metavar="N", help="With --json: log-probabilities, of N alternatives too.")
    ] = None
    stats: Annotated[bool, typer.Option("--stats", help="Then what was drafted and accepted, and its speed.")] = False
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Decode plainly too: both speeds, and whether the tokens are identical."),
    ] = False


@verb
def command(prompt: PromptOptions, model: ModelOptions, sampling: SamplingOptions, output: OutputOptions) -> None:
    """Answer one prompt, streaming.

    Drafted tokens that the model accepted are coloured, if stdout is a terminal.

    Examples:

    \b
      foretell generate "Why is the sky blue?"
      foretell generate "Repeat: one two three four" --temperature 0 --compare
      foretell generate --raw "Once upon a time" --max-tokens 64 --seed 7 --stats
      cat article.txt | foretell generate - --system "Summarize in one sentence."
      foretell generate "Hello" --model ./llama.gguf --draft-model ./small.gguf --draft-tokens 5
      foretell generate "Print main.py with tabs for spaces" --prediction main.py
      foretell generate "Hello" --json --logprobs 2 | jq .stats

    \b
    --stats estimates the speed-up over plain decoding and the time spent on
    rejected drafts from what the steps took and what forwards cost here;
    --compare measures the speed-up. With it the exit code is 1 if the tokens
    differ although the rule promises the same ones. Options also have the names
    that they have in vLLM, SGLang, llama.cpp and transformers
    (--num-speculative-tokens, --draft-max, --assistant-model, -md, --n-predict,
    --temp and the like).
    """
    if output.logprobs is not None and not output.json:
        raise ValueError("--logprobs needs --json: they are not part of the text")
    chosen = sampling.sampling(logprobs=output.logprobs, prediction=prompt.predicted())
    llm = load(model)
    tokens = prompt.encoded(llm)
    with Interrupt() as interrupt:
        if output.compare:
            warm_up(llm)
        run = Run(llm, tokens, chosen, stopping=interrupt)
        _show(run, llm, output.json)
        compared = None
        if output.compare and not interrupt():
            with progress() as say:
                say("decoding without drafts, to compare")
                compared = compare(run, llm, chosen, interrupt)
    _report(run, llm, model.rule, output, compared)
    if interrupt():
        raise typer.Exit(130)
    if compared and not compared.identical:
        _judge(chosen, model.rule)


def _token_id(word: str) -> int:
    if not word.isdigit():
        raise ValueError(f"--token-ids: {word!r} is not a token id")
    return int(word)


def _show(run: Run, llm: LLM, quiet: bool) -> None:
    """Run to the end, writing the text as it comes unless quiet."""
    if quiet:
        run.finish()
        return
    colour = colours()
    if colour and llm.drafter.draft_tokens:
        print(LEGEND, file=sys.stderr)
    writer = Writer(llm.tokenizer, colour)
    for event in run.events():
        writer.write(event)
    writer.end()


def _report(run: Run, llm: LLM, rule: str, output: OutputOptions, compared: Comparison | None) -> None:
    if output.json:
        extra: dict[str, Any] = {}
        if compared:
            extra["compare"] = {
                "plain_tokens_per_second": compared.plain_speed,
                "tokens_per_second": compared.drafted_speed,
                "speedup": compared.speedup,
                "identical": compared.identical,
                "first_difference": compared.difference,
                "plain_token_ids": compared.plain_tokens,
            }
        print(json.dumps(report.as_json(run, llm, rule) | extra, ensure_ascii=False))
        return
    if output.stats:
        report.show_stats(run, llm, rule)
    if compared:
        report.show(report.comparison_table(run, compared))


def _judge(sampling: Sampling, rule: str) -> None:
    """What it means that the tokens differ."""
    if report.keeps_tokens(rule, sampling.temperature):
        fail("the tokens differ from those of plain decoding", 1)
    print(f"foretell: rule {rule!r} keeps the distribution, not the draws, at this temperature", file=sys.stderr)
