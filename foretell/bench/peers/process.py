"""A peer's process: started, asked and ended from here, and stopped by a signal while it is not asked.

An engine that waits for work may spin on every core; stopped, it cannot disturb whoever's turn it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("workers") / "worker.py"
POLL_S = 0.2


class PeerError(Exception):
    """The peer is of no more use; one sentence says why."""


class Stopped(Exception):
    """The user asked to stop while the peer was at work."""


class Process:
    """One peer in a group of processes of its own, which Ctrl-C in the terminal does not reach."""

    def __init__(self, python: str, options: Mapping[str, Any], timeout_s: float, script: Path = WORKER) -> None:
        """timeout_s: for every answer, the loading included. PeerError if it cannot be started."""
        self._timeout_s = timeout_s
        self._log = tempfile.TemporaryFile()
        self._seen = b""
        threads = str(options["threads"])
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        try:
            self._process = subprocess.Popen(
                [python, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=environment,
                process_group=0,
            )
        except OSError as error:
            raise PeerError(f"{python} cannot be started: {error.strerror}") from error
        self._send(options)

    def load(self, stopping: Callable[[], bool]) -> dict[str, Any]:
        """What it says once it has loaded, or has failed to; stopped from then on."""
        answer = self._line(stopping)
        self._signal(signal.SIGSTOP)
        return answer

    def ask(self, question: Mapping[str, Any], stopping: Callable[[], bool]) -> dict[str, Any]:
        """The answer to one question. PeerError if there is none, Stopped if the user would not wait for it."""
        self._signal(signal.SIGCONT)
        self._send(question)
        answer = self._line(stopping)
        self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def close(self) -> None:
        """End it and whatever it started; harmless if it has ended."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was still to be written has nobody to read it
                    stream.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise PeerError(self._end()) from error

    def _line(self, stopping: Callable[[], bool]) -> dict[str, Any]:
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        deadline = time.monotonic() + self._timeout_s
        while b"\n" not in self._seen:
            if stopping():
                raise Stopped
            if time.monotonic() > deadline:
                raise PeerError(f"it has not answered within {self._timeout_s:g} s")
            if not select.select([file], [], [], POLL_S)[0]:
                continue
            data = os.read(file, 1 << 20)
            if not data:
                raise PeerError(self._end())
            self._seen += data
        line, _, self._seen = self._seen.partition(b"\n")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise PeerError("it answered something that is not JSON") from error
        return answer

    def _end(self) -> str:
        """How it ended, and the last it had to say."""
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return "it closed its output and runs on"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return f"it ended with {how}" + (f": {lines[-1]}" if lines else "")

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of one that has ended
            os.killpg(self._process.pid, number)


def interpreter(given: str | None) -> str:
    """The Python to use: the one named, or this one."""
    return sys.executable if given is None else os.path.expanduser(given)
