"""Damage inputs of every kind, run the real commands on them, and say what became of each.

PYTHONPATH=tests python -m fuzzing --cases 1000, of each kind, always the same ones; --show with
--kind config --only 17 shows one of them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TQDM_DISABLE="1")

from fuzzing.inputs import KINDS, Case, make_sound
from fuzzing.running import Ending, run_cases


def main() -> int:
    """Run what the command line asks for; the exit code is 1 if anything bad happened."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="these kinds only")
    parser.add_argument("--only", type=int, help="this case only")
    parser.add_argument("--show", action="store_true", help="show what every case says")
    given = parser.parse_args()
    numbers = range(given.first, given.first + given.cases)
    chosen = numbers if given.only is None else range(given.only, given.only + 1)
    bad: list[Ending] = []
    table: dict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory(prefix="calipers-fuzz-") as place:
        sound = make_sound(Path(place) / "sound")
        for kind in given.kind or KINDS:
            cases = [Case(kind, number) for number in chosen]
            for ending in run_cases(cases, sound, Path(place) / "cases"):
                table[kind]["BAD" if ending.is_bad else ending.outcome] += 1
                bad += [ending] if ending.is_bad else []
                if ending.is_bad or given.show:
                    _show(ending)
            print(f"{kind}: {dict(table[kind])}", file=sys.stderr, flush=True)
    _print_table(table)
    return 1 if bad else 0


def _show(ending: Ending) -> None:
    case = ending.case
    print(f"\n{case.kind} {case.number}, {ending.seconds:.1f} s: {ending.command}")
    print(f"  {ending.outcome}\n  {ending.said.strip()}"[:2000], flush=True)


def _print_table(table: dict[str, Counter[str]]) -> None:
    outcomes = sorted({outcome for counts in table.values() for outcome in counts})
    rows = [["kind", "cases", *outcomes]]
    rows += [
        [kind, str(sum(counts.values())), *(str(counts[outcome]) for outcome in outcomes)]
        for kind, counts in table.items()
    ]
    totals = [sum(counts[outcome] for counts in table.values()) for outcome in outcomes]
    rows.append(["all", str(sum(totals)), *map(str, totals)])
    for row in rows:
        print(
            "  ".join(
                cell.rjust(max(10, len(head))) for cell, head in zip(row, rows[0], strict=True)
            )
        )


if __name__ == "__main__":
    raise SystemExit(main())
