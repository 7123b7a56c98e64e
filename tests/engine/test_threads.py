"""Nothing but the kernels' own threads runs beside a step: PyTorch's would spin for milliseconds after any little work
shared with them, on the cores that the next forward needs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from foretell import kernels

SCRIPT = """
import time, torch
torch.set_num_threads(1)  # loading may share its work, but not here
from foretell import LLM, Sampling
llm = LLM("smollm2-135m-instruct", drafter="ngram", draft_tokens=8, max_context=256)
torch.set_num_threads(2)
for temperature in (0.0, 0.8):
    llm.generate(["one two three one two three one two"] * 8, Sampling(temperature=temperature, seed=1, max_tokens=4))
before = time.process_time()
time.sleep(0.5)
print(time.process_time() - before)
"""


@pytest.mark.skipif(kernels.library() is None, reason="no native kernels here")
def test_no_thread_of_pytorch_is_woken_by_a_step() -> None:
    # threads that are told to wait actively spin on after their first work, for as long as anyone looks
    environment = {**os.environ, "OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "infinite", "OMP_NUM_THREADS": "2"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    assert float(run.stdout.split()[-1]) < 0.1
