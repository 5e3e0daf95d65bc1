"""How far a long step is: a bar with bytes on stderr, where that is a terminal."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function to call with the bytes that are done and those there are in all; it shows them to people alone."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    # Without a thread that refreshes it: a process with threads does not fork.
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(what, total=None)
        shown = 0.0

        def show(done: int, total: int) -> None:
            nonlocal shown
            now = time.monotonic()
            if now - shown > 0.1 or done == total:
                shown = now
                bar.update(task, completed=done, total=total, refresh=True)

        yield show
