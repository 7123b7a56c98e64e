"""The products through AMX's tiles, on any machine: the same source, with the tiles' operations in plain C++."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from foretell import kernels

HEADER = Path(__file__).with_name("tiles.hpp")
pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no native kernels: there is no C++ compiler here")

SCRIPT = """
import sys
import numpy as np, torch
from foretell.models.check import rows_are_independent
from foretell.models.native import NativeOps, layout
from tests.models.drive import Driver, random_llama

found = {"block": layout(torch.int8).block}
for dtype in (torch.bfloat16, torch.int8):
    name = str(dtype)[6:]
    ops = NativeOps(dtype, 2)
    print(ops.backend, rows_are_independent(ops, 64))
    generator = torch.Generator().manual_seed(0)
    for outputs, inputs in ((1, 1), (15, 32), (33, 64), (50, 37), (130, 576), (96, 1039)):
        weight = torch.randn(outputs, inputs, generator=generator)
        x = torch.randn(50, inputs, generator=generator) * 10 ** torch.randn(50, 1, generator=generator)
        residual, bias = torch.randn(50, outputs, generator=generator), torch.randn(outputs, generator=generator)
        packed = ops.pack(weight)
        size = x.abs().amax(1, keepdim=True) * weight.abs().max() * inputs**0.5  # what rounding is relative to
        for rows in (1, 2, 15, 16, 17, 33, 50):
            out = ops.linear(x[:rows], packed, bias, residual[:rows].clone())
            found[f"{name} {outputs}x{inputs} {rows}"] = (out / size[:rows]).numpy()
        found[f"{name} {outputs}x{inputs} embedded"] = ops.embed(packed, torch.arange(outputs)).numpy().copy()
    driver = Driver(random_llama(ops))
    found[f"{name} logits"] = driver.prefill(list(range(1, 71)), [33, 37])[1].numpy()
    assert torch.equal(driver.plain(list(range(1, 71))), torch.from_numpy(found[f"{name} logits"]))
np.savez(sys.argv[1], **found)
"""


def run(folder: Path, flags: str, **more: str) -> tuple[list[str], dict[str, np.ndarray]]:
    environment = {**os.environ, "CXXFLAGS": flags, "FORETELL_CACHE": str(folder / "cache"), **more}
    environment["PYTHONPATH"] = str(HEADER.parents[2])
    command = [sys.executable, "-c", SCRIPT, str(folder / "found.npz")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    with np.load(folder / "found.npz") as found:
        return ran.stdout.splitlines(), dict(found)


def test_tiles(tmp_path: Path) -> None:
    vectors, tiles, refused = (tmp_path / name for name in ("vectors", "tiles", "refused"))
    for folder in (vectors, tiles, refused):
        folder.mkdir()
    # a processor that has tiles is told to do without, so that there is something to compare with
    _, wanted = run(vectors, "-mno-amx-tile")
    said, found = run(tiles, f"-include {HEADER}")
    assert said == ["native-amx True", "native-amx True"] and found["block"] == 16
    for name, values in wanted.items():
        if name.startswith("int8") or name.endswith("embedded"):
            assert np.array_equal(found[name], values), name
        elif name != "block":
            assert np.abs(found[name] - values).max() < (2e-2 if name.endswith("logits") else 3e-6), name
    # the system may refuse: then vectors, and their packing
    said, found = run(refused, f"-include {HEADER}", FORETELL_NO_TILES="1")
    assert not any("amx" in line for line in said)
    assert all(np.array_equal(found[name], values) for name, values in wanted.items())
