"""Where a model computes, and what repeats a computation there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

CPU = torch.device("cpu")
DEVICES = ("auto", "cpu", "cuda")
Found = TypeVar("Found")


def device_of(name: str) -> torch.device:
    """The device of that name; "auto" is the CPU. ValueError if there is none of that name."""
    if name not in DEVICES:
        raise ValueError(f"device {name!r} is not supported: choose 'auto', 'cpu' or 'cuda'")
    if name in ("auto", "cpu"):  # "auto" stays on the CPU until the other path has been run on a GPU
        return CPU
    if not torch.cuda.is_available():
        raise ValueError("no CUDA device is available here: use device='cpu'")
    return torch.device("cuda", torch.cuda.current_device())


def free_memory_of(device: torch.device) -> int:
    """Bytes that are free on a GPU now."""
    return torch.cuda.mem_get_info(device)[0]


def name_of(device: torch.device) -> str:
    """One word: "cuda-" and the GPU's own name."""
    return "-".join(["cuda", *torch.cuda.get_device_name(device).lower().split()])


class Capture:
    """Makes of a computation over tensors that stay in place one that can be repeated after they were written anew.

    On the CPU it is the computation itself: what holds for its inputs, its shapes and its results can be tried there.
    """

    def __call__(self, compute: Callable[[], Found]) -> Callable[[], Found]:
        return compute


class GraphCapture(Capture):
    """As a CUDA graph: one launch for all its kernels. What `compute` returns is overwritten by every repetition of
    this and of any other graph made here, which share their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Found]) -> Callable[[], Found]:
        compute()  # libraries load and set themselves up, which a graph could not hold
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            found = compute()

        def repeat() -> Found:
            graph.replay()
            return found

        return repeat
