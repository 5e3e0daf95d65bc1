"""The one exception for users: where, what is wrong, what to do."""

from pathlib import Path

_LONGEST = 2000


def printable(text: str) -> str:
    """A text of unknown origin on one line of a terminal: what is not printable is escaped, what is endless is cut."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:_LONGEST])
    return shown if len(shown) <= _LONGEST and len(text) <= _LONGEST else f"{shown[:_LONGEST]}..."


class CheckpointError(Exception):
    """A path, what is wrong with it, and what to do about it.

    `others` holds further findings of the same check, so that one bad shard does not hide the next. As a string it is
    one line for each finding: names in a file are chosen by whoever made it, and control nobody's terminal.
    """

    exit_code = 1
    label = "error"

    def __init__(self, path: Path | str, problem: str, remedy: str = "", others: "tuple[CheckpointError, ...]" = ()):
        self.path = path
        self.problem = problem
        self.remedy = remedy
        self.others = others
        super().__init__(path, problem, remedy, others)  # all arguments, so that it survives pickling

    def __str__(self) -> str:
        first = f"{self.path}: {self.problem}" + (f"; {self.remedy}" if self.remedy else "")
        return "\n".join([printable(first), *map(str, self.others)])


class CheckpointBusy(CheckpointError):
    """Another process is changing the checkpoint."""

    exit_code = 3


def all_of(errors: "list[CheckpointError]") -> CheckpointError:
    """Join the findings of one check into one error, the first one leading; the list must not be empty."""
    first, *rest = errors
    return CheckpointError(first.path, first.problem, first.remedy, (*first.others, *rest))
