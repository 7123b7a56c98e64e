"""How many nodes pay, as pure functions: gains are tokens, prices the tokens that the time would otherwise bring.

Expected tokens over expected seconds are largest in the long run if every step takes the nodes whose gain exceeds
rate * seconds, rate being that largest ratio itself (Dinkelbach; the renewal-reward theorem). So one number, the
present rate, prices time, and each step decides alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def choose(gains: Sequence[Sequence[float]], price: Callable[[int], float]) -> list[int]:
    """How many nodes each request gets. gains: of each request, the chance of every node in the order they are taken,
    never rising; price(n): tokens lost by the time for n nodes in all. Takes the most gainful nodes of all requests, as
    many as leave most."""
    order = sorted((-gain, request) for request, row in enumerate(gains) for gain in row)
    best, kept, total = 0.0, 0, 0.0
    for n, (negative, _) in enumerate(order, 1):
        total -= negative
        left = total - price(n)
        if left > best:
            best, kept = left, n
    counts = [0] * len(gains)
    for _, request in order[:kept]:
        counts[request] += 1
    return counts


def prices(price: Callable[[int], float], most: int, requests: int = 1) -> list[float]:
    """What the chance of a request's next node must be for it to have any prospect of paying, when the request has
    0, 1, ... most - 1 nodes and the others as many: the lowest mean price of further nodes, since a dear row may be
    followed by cheap ones."""
    at = [price(requests * n) / requests for n in range(most + 1)]
    return [min((at[m] - at[n]) / (m - n) for m in range(n + 1, most + 1)) for n in range(most)]
