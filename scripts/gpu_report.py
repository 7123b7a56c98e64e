"""Sums up what gpu_check.sh measured: FORWARD DECODE..., JSON files of `foretell bench`. Fails unless it is exact."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def forward_lines(result: dict[str, Any]) -> list[str]:
    found = [f"{row['rows']} rows {row['ms']:.2f} ms" for row in result["rows"]]
    return [f"{result['backend']}, {result['model']}: rows independent: {_yes(result['exact'])}", ", ".join(found)]


def decode_line(result: dict[str, Any]) -> str:
    whole = result["all"]
    plain, drafted = (whole[engine]["tokens_per_second"] for engine in ("plain", "drafted"))
    return (
        f"temperature {result['settings']['temperature']}: plain {plain:.1f} tok/s, drafted {drafted:.1f} tok/s, "
        f"{whole['speedup']:.2f}x, E {whole['E']:.2f}, tokens identical: {_yes(whole['identical'])}"
    )


def _yes(holds: bool) -> str:
    return "yes" if holds else "NO"


def main(forward: Path, *decodes: Path) -> int:
    """Prints what there is; 1 if something is missing, or is not what was promised."""
    try:
        measured, answers = json.loads(forward.read_text()), [json.loads(path.read_text()) for path in decodes]
    except ValueError:
        print("gpu_report: a measurement is missing, see above", file=sys.stderr)
        return 1
    print("\n".join([*forward_lines(measured), *map(decode_line, answers)]))
    return int(not measured["exact"] or not all(answer["all"]["identical"] for answer in answers))


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
