"""Ways to run the program: in this process, or as a process of its own in a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Mapping

from typer.testing import CliRunner, Result

from foretell.cli import app

PROGRAM = [sys.executable, "-c", "from foretell.cli import main; main()"]
LIMIT_S = 60.0


def foretell(*arguments: object, input: str | None = None) -> Result:
    """In this process; stdout is no terminal."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=input)


class Terminal:
    """The program in a pseudo-terminal, and what it has written there."""

    def __init__(self, *arguments: object, env: Mapping[str, str] | None = None) -> None:
        ours, theirs = pty.openpty()
        self.seen = ""
        self._fd = ours
        environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
        self.process = subprocess.Popen(
            [*PROGRAM, *map(str, arguments)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environment, "TERM": "xterm", **(env or {})},
            start_new_session=True,
            preexec_fn=_control_terminal,
        )
        os.close(theirs)

    def until(self, text: str) -> str:
        """Wait until this has been written since the last call; returns what came up to it."""
        return self._read(text)

    def send(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def end(self) -> tuple[int, str]:
        """Wait for the end: exit code, and what came since the last `until`."""
        rest = self._read(None)
        os.close(self._fd)
        return self.process.wait(LIMIT_S), rest

    def _read(self, wanted: str | None) -> str:
        deadline = time.monotonic() + LIMIT_S
        while wanted is None or wanted not in self.seen:
            ready = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                self.process.kill()
                raise AssertionError(f"waited for {wanted!r}, got {self.seen!r}")
            try:
                data = os.read(self._fd, 65536)
            except OSError:  # how Linux says that the other side is closed
                data = b""
            if not data:
                break
            self.seen += data.decode(errors="replace")
        assert wanted is None or wanted in self.seen, self.seen
        end = len(self.seen) if wanted is None else self.seen.index(wanted) + len(wanted)
        taken, self.seen = self.seen[:end], self.seen[end:]
        return taken


def _control_terminal() -> None:
    """Ctrl-C in the terminal reaches the program only if it is its controlling terminal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
