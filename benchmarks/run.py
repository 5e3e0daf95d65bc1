"""Every benchmark as ratios of whole processes, side by side on this machine: one table at the end."""

import argparse
import os
import platform
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import actor_critic
import first_step
import merge
import pissa
import value_head
from measure import PAIRS, compare, peak_bytes, table

BENCHMARKS = (
    value_head.start,
    value_head.in_place_1_gb,
    value_head.in_place_4_gb,
    value_head.in_place_16_gb,
    value_head.in_place,
    value_head.in_place_against_loading,
    value_head.copied,
    value_head.to_output,
    actor_critic.split,
    actor_critic.split_4_gb,
    pissa.convert,
    merge.against_copy,
    merge.against_peft,
    first_step.start,
)


def main() -> None:
    """Build the inputs in a folder of their own, measure, print the table, and remove the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    where = "where inputs are built and removed again; the file system that is measured, 20 GB free"
    parser.add_argument("--folder", type=Path, default=Path(".demo/bench"), help=where)
    parent = parser.parse_args().folder.resolve()
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        machine = machine_line(folder)
        results = [compare(benchmark(folder), folder / "log") for benchmark in BENCHMARKS]
    own_peak = peak_bytes(getrusage(RUSAGE_SELF))
    print(f"{machine}; load at the end {os.getloadavg()[0]:.1f}")
    print(f"Median (min-max) of {PAIRS} alternating pairs of whole processes, wall time; below 1, A is faster.")
    print("Page cache warm for both: an untimed pair first; the disk flushed before each process.")
    print(f"Peaks are the highest seen, and at least this script's own {own_peak / 1e6:.0f} MB.\n")
    print(table(results))


def machine_line(folder: Path) -> str:
    """Cores, Python, file system, date and load."""
    return (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{file_system(folder)}, {datetime.now(UTC):%Y-%m-%d}; load at the start {os.getloadavg()[0]:.1f}"
    )


def file_system(folder: Path) -> str:
    """The type of the file system that holds a folder, where Linux tells."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return "unknown file system"
    types = {Path(line.split()[1]): line.split()[2] for line in mounts.read_text().splitlines()}
    return next(types[place] for place in (folder, *folder.parents) if place in types)


if __name__ == "__main__":
    main()
