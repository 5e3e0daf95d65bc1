"""Work done by a second process while this one does its own: computing tensors is what takes the time of a merge."""

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def can_fork() -> bool:
    """Whether a second process helps and is safe: there is a core for it, and no thread here holds a lock."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1  # Linux alone tells
    return cores > 1 and threading.active_count() == 1


@contextmanager
def apart(work: Callable[[], None]) -> Iterator[None]:
    """Do `work` in a process of its own while the block runs, and wait for it; what it raises is raised here.

    It shares files and shared memory with this process; other changes it makes stay its own.
    """
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            _end_with(parent)
            work()
            os._exit(0)
        except BaseException as error:
            os.write(writing, pickle.dumps(error))
            os._exit(1)
    os.close(writing)
    try:
        yield
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        with open(reading, "rb") as pipe:  # noqa: PTH123 - a descriptor, not a path
            raised = pipe.read()
        _, status = os.waitpid(child, 0)
    if raised:
        raise pickle.loads(raised)
    if code := os.waitstatus_to_exitcode(status):
        raise OSError(f"the second process ended with {code}")


def _end_with(parent: int) -> None:
    """Look every second whether the parent still lives; what it has locked is free again soon after it was killed."""
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1) if os.getppid() != parent else None)
    signal.setitimer(signal.ITIMER_REAL, 1, 1)
