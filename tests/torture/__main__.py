"""The proof that nothing is ever lost: every step on every layout, killed, failed and cut from power at every call.

    python -m torture [--jobs 2] [WORD ...]     only the cases with these words in their names

Needs Linux, root and strace. Prints a line for each trial, then the totals; ends with 1 if any law is broken.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from torture.cases import all_cases, tiny_llama
from torture.trials import Result, attempt, trials


def main() -> int:
    """Try everything; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("words", nargs="*", help="only cases whose names contain one of these")
    parser.add_argument("--jobs", type=int, default=2)
    given, started = parser.parse_args(), time.perf_counter()
    results = []
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        Path(folder).chmod(0o755)  # users who may not write may read
        cases = all_cases(tiny_llama(Path(folder) / "tiny"))
        chosen = [name for name in cases if not given.words or any(word in name for word in given.words)]
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(given.jobs, mp_context=context) as pool:
            work = [
                pool.submit(attempt, trial, case)
                for case in (cases[name]() for name in chosen)
                for trial in trials(case.name)
            ]
            for done in as_completed(work):
                results.append(done.result())
                _print(results[-1])
    return _print_totals(results, time.perf_counter() - started, complete=not given.words)


def _print(result: Result) -> None:
    verdict = f"{len(result.broken)} BROKEN" if result.broken else result.told or "nothing lost"
    print(f"{result.case:45} {result.count:5} {result.kind:34} {result.seconds:6.1f} s  {verdict}", flush=True)
    for line in list(dict.fromkeys(result.broken))[:20]:
        print(f"    {line}", flush=True)


def _print_totals(results: list[Result], seconds: float, *, complete: bool) -> int:
    total, broken = Counter[str](), [line for result in results for line in result.broken]
    needed: dict[str, list[str]] = {}
    for result in results:
        total[result.kind] += result.count
        for place, is_needed in result.flushes.items():
            needed.setdefault(place, []).extend([result.case] if is_needed else [])
    print("\nfsync left out                                               first of the cases that notice")
    for place, noticed in sorted(needed.items()):
        print(f"{place:60} {len(noticed):3} {noticed[0] if noticed else 'NOBODY NOTICES'}")
    if complete:
        broken += [f"{place}: no case needs this fsync" for place, noticed in needed.items() if not noticed]
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(total.items()))
    print(f"\n{counts}: {f'{len(broken)} LAWS BROKEN' if broken else 'nothing lost'} ({seconds:.0f} s)")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
