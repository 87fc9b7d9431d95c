"""Collectives between the devices of this host, as many ranks as there are; the cases of conformance level 5.

    python tools/ranks.py --backend cuda_sm90 [--ranks 2]

Level 5 wants three ranks and says nothing with fewer. This runs what fewer allow, and says how many took part: with one
rank the calls, shapes and buffers of the library are tried and nothing moves between devices.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from deepinfer.conformance.rank_levels import judge
from deepinfer.conformance.rank_process import ABSENT, ENDINGS, VICTIMS, run_processes
from deepinfer.conformance.rank_programs import FOR_SEVERAL, PROGRAMS
from deepinfer.ops.registry import find_backend


def possible_cases(ranks: int) -> list[str]:
    """Names of the cases that so many ranks can run, in order."""
    programs = [name for name in PROGRAMS if ranks > 1 or name not in FOR_SEVERAL]
    return programs + [name for name in ENDINGS if name == ABSENT or VICTIMS[name] < ranks]


def run(backend: str, ranks: int) -> bool:
    """Run them, print a line for each; whether all passed."""
    cases = possible_cases(ranks)
    runs = run_processes(backend, cases, ranks)
    failed = 0
    for case in cases:
        wrong = [f"{check.name}: {check.detail}" for check in judge(case, runs, cases) if not check.ok]
        failed += bool(wrong)
        print(f"{'FAIL' if wrong else 'ok  '} {case}{''.join(f'{chr(10)}       {line}' for line in wrong)}")
    left = len(PROGRAMS) + len(ENDINGS) - len(cases)
    print(f"{backend}, {ranks} rank(s): {len(cases) - failed} of {len(cases)} cases passed, {left} need more ranks")
    return not failed


def main(argv: Sequence[str] | None = None) -> int:
    """0 when all passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--ranks", type=int, help="processes; by default one for each device")
    asked = parser.parse_args(argv)
    runtime = find_backend(asked.backend).runtime
    if runtime is None:
        parser.error(f"backend {asked.backend} has no device")
    return 0 if run(asked.backend, asked.ranks or runtime().capabilities.num_devices) else 1


if __name__ == "__main__":
    sys.exit(main())
