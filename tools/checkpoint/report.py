"""Report: what a step did."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Report:
    """The result of one step on one directory; the same value is printed, returned by the task and recorded.

    `written`, `edited` and `removed` name files relative to `path`; `bytes_written` counts bytes that reached the
    disk, so an in-place header edit costs a few kB whatever the size of the shard.
    """

    step: str
    path: str
    changed: bool
    summary: str
    written: tuple[str, ...] = ()
    edited: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    bytes_written: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, in the order of the fields."""
        return asdict(self)


def joined(run: Path, reports: Sequence[Report], seconds: float) -> Report:
    """The reports on a run directory and its checkpoints as one; a single report is returned as it is."""
    if len(reports) == 1:
        return reports[0]

    def within(report: Report, names: tuple[str, ...]) -> list[str]:
        return [(Path(report.path) / name).relative_to(run).as_posix() for name in names]

    changed = [report for report in reports if report.changed]
    return Report(
        reports[0].step,
        str(run),
        changed=bool(changed),
        summary=f"{len(changed)} of {len(reports)} directories changed" if changed else reports[0].summary,
        written=tuple(name for report in reports for name in within(report, report.written)),
        edited=tuple(name for report in reports for name in within(report, report.edited)),
        removed=tuple(name for report in reports for name in within(report, report.removed)),
        details={report.path: report.summary for report in reports},
        bytes_written=sum(report.bytes_written for report in reports),
        seconds=round(seconds, 3),
    )


def size_text(nbytes: int) -> str:
    """A byte count as people read it: `538.1 MB`."""
    amount = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
