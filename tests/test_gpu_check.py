"""scripts/gpu_check.sh, as far as a machine without a GPU can run it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.cli.conftest import write_tiny
from tests.cli.run import foretell

SCRIPTS = Path(__file__).parent.parent / "scripts"


def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_report", SCRIPTS / "gpu_report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(tmp_path: Path, **programs: str) -> subprocess.CompletedProcess[str]:
    """The script with these programs before all others."""
    for name, text in programs.items():
        path = tmp_path / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "python")}
    return subprocess.run([SCRIPTS / "gpu_check.sh"], env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("programs", "said"),
    [
        ({"nvidia_smi": "exit 9"}, "there is no GPU here"),
        ({"nvidia_smi": "echo 'GPU 0: such'", "python": "exit 1"}, "PyTorch sees no GPU here"),
    ],
)
def test_without_a_gpu_it_says_so(tmp_path: Path, programs: dict[str, str], said: str) -> None:
    done = check(tmp_path, **programs)
    assert done.returncode == 2 and done.stdout == ""
    assert said in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("identical", [True, False])
def test_it_runs_tests_and_measures(tmp_path: Path, identical: bool) -> None:
    """A GPU and a Python that are pretended: what is called in which order, and what the exit code says."""
    answer = {"settings": {"temperature": 0.0}, "all": figures(identical)}
    measured = {"backend": "cuda-such", "model": "m", "exact": True, "rows": [{"rows": 1, "ms": 2.0}]}
    calls = tmp_path / "calls"
    python = f"""echo "$@" >> {calls}
case "$*" in
*forward*) echo '{json.dumps(measured)}' ;;
*"bench decode"*) echo '{json.dumps(answer)}' ;;
*gpu_report*) exec {sys.executable} "$@" ;;
esac"""
    done = check(tmp_path, nvidia_smi="echo 'GPU 0: such'", python=python.replace("*forward*", '*"bench forward"*'))
    assert done.returncode == (0 if identical else 1), done.stderr
    assert "1 rows 2.00 ms" in done.stdout
    assert f"1.50x, E 1.80, tokens identical: {'yes' if identical else 'NO'}" in done.stdout
    assert "-m pytest -m cuda" in calls.read_text() and calls.read_text().count("--device cuda") == 3


def figures(identical: bool) -> dict[str, Any]:
    speeds = {name: {"tokens_per_second": s} for name, s in (("plain", 10.0), ("drafted", 15.0))}
    return {**speeds, "speedup": 1.5, "E": 1.8, "identical": identical}


def test_a_measurement_that_failed_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").write_text("")
    assert report().main(tmp_path / "empty") == 1
    assert "a measurement is missing" in capsys.readouterr().err


def test_it_reads_what_the_measurements_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same commands, on the CPU."""
    model = str(write_tiny(tmp_path / "tiny"))
    forward = foretell(
        "bench", "forward", "--model", model, "--device", "cpu", "--rows", "1,2", "--context", "9", "--json"
    )
    decode = foretell("bench", "decode", "--model", model, "--device", "cpu", "--kind", "list", "-n", "4", "--json")
    for name, done in (("forward", forward), ("decode", decode)):
        (tmp_path / name).write_text(done.stdout)
    assert report().main(tmp_path / "forward", tmp_path / "decode") == 0
    said = capsys.readouterr().out
    assert "rows independent: yes" in said and "tokens identical: yes" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("verb", [["generate", "x"], ["bench", "forward"], ["bench", "decode"]], ids=" ".join)
def test_a_device_that_is_not_there_is_a_bad_argument(tmp_path: Path, verb: list[str]) -> None:
    done = foretell(*verb, "--model", str(write_tiny(tmp_path / "tiny")), "--device", "cuda")
    assert done.exit_code == 2
    assert "no CUDA device is available here: use device='cpu'" in done.stderr and len(done.stderr.splitlines()) == 1
