"""`foretell chat`: through a pipe, and in a terminal with pastes and Ctrl-C."""

from __future__ import annotations

from pathlib import Path

from foretell import LLM, Sampling
from foretell.cli.chat import Chat
from tests.cli.conftest import write_tiny
from tests.cli.run import Terminal, foretell


def test_piped(tiny: Path) -> None:
    typed = "hello\n/stats\n/temperature 0\n/temperature warm\n/nonsense\n\n/help\nagain\n/stats\n/exit\nnever read\n"
    result = foretell("chat", "-m", tiny, "-n", 12, "--seed", 1, input=typed)
    assert result.exit_code == 0
    assert result.stdout.strip() and "> " not in result.stdout
    assert "there is no /nonsense" in result.stderr and "/temperature takes a number" in result.stderr
    assert result.stderr.count("cached prompt tokens") == result.stderr.count("over plain decoding (estimated)") == 2
    assert "/reset " in result.stderr


def test_turns_build_on_one_another(tiny: Path) -> None:
    chat = Chat(LLM(tiny, max_batch=1), Sampling(temperature=0, max_tokens=40), "match", "Be brief.")
    chat._answer("first")
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]
    chat._answer("second")
    assert chat.last is not None and chat.last.request.stats.cached_tokens >= 32
    assert [message["role"] for message in chat.messages][3:] == ["user", "assistant"]
    chat._command("/system", "Be long.")
    assert chat.messages == [{"role": "system", "content": "Be long."}]
    chat._command("/reset", "")
    assert chat.messages == [{"role": "system", "content": "Be long."}]
    chat._command("/system", "")
    assert chat.messages == []


def test_a_conversation_that_no_longer_fits_is_kept(tiny: Path) -> None:
    typed = "hello\n" + 300 * "much " + "\nhi\n"
    result = foretell("chat", "-m", tiny, "-n", 5, "--max-context", 200, input=typed)
    assert result.exit_code == 0
    assert result.stderr.count("not sent") == 1 and "the largest that fits is 199" in result.stderr
    assert "the conversation is kept" in result.stderr


def test_needs_a_template(tmp_path: Path) -> None:
    result = foretell("chat", "-m", write_tiny(tmp_path / "bare", tokenizer=False), input="hi\n")
    assert result.exit_code == 2 and "no chat template" in result.stderr


def test_terminal(tiny: Path) -> None:
    run = Terminal("chat", "-m", tiny, "-n", 3000, "--ignore-eos", "--max-context", 4000, env={"NO_COLOR": "1"})
    run.until("/help for help")
    run.until("> ")
    run.send("first line\nsecond line\n")  # a paste: one message
    run.until("second line\r\n")
    run.until("\ufffd")
    run.send("\x03")
    run.until("> ")  # only the answer has ended
    run.send("/stats\n")
    figures = run.until("tokens/s")
    assert figures.count("rounds") == 1
    run.until("> ")
    run.send("\x04")
    code, seen = run.end()
    assert code == 0 and "Traceback" not in seen
