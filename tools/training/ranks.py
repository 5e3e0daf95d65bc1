"""The processes of one run: how they wait for each other, and go the same way or end with the same error."""

import contextlib
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from tools.checkpoint.errors import CheckpointError

T = TypeVar("T")

# By so much the others wait longer for the first process, which alone can tell who is missing.
LATER_S = 5.0


class RankHangs(CheckpointError):
    """A process of the run does not come to where the others wait for it."""


class RankGone(CheckpointError):
    """A process of the run has ended before the others."""


def is_one_of_several() -> bool:
    """Whether a launcher (ours, torchrun, accelerate) has started this process as one of several."""
    return "LOCAL_RANK" in os.environ and world_size() > 1


def world_size() -> int:
    """How many processes train together, by the environment of a launcher; 1 without."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1


def rank() -> int:
    """The number of this process among them, from 0."""
    return int(os.environ.get("RANK", "0")) if is_one_of_several() else 0


def local_rank() -> int:
    """Its number on this machine, which is that of its device."""
    return int(os.environ.get("LOCAL_RANK", "0"))


@dataclass(frozen=True)
class Peers:
    """All processes of a run, as each of them sees them: each calls the same methods in the same order.

    A process that does not come within `timeout_s` is named with the directory `run`. Alone (`group` None), nothing
    here waits for anybody. `names` say where to find each.
    """

    run: Path
    timeout_s: float
    group: Any = None
    rank: int = 0
    names: Sequence[str] = ()

    def meet(self, where: str) -> None:
        """Wait until all are here. Raises RankHangs naming those that do not come to `where`, such as `step 3`."""
        if self.group is None:
            return
        from torch.distributed import monitored_barrier

        began = monotonic()
        try:
            monitored_barrier(self.group, timedelta(seconds=self.timeout_s), wait_all_ranks=True)
        except RuntimeError as error:
            raise self._missing(str(error), where, monotonic() - began) from error

    def largest(self, number: int, where: str) -> int:
        """The largest of the numbers that the processes bring to `where`."""
        if self.group is None:
            return number
        import torch
        from torch.distributed import ReduceOp, all_reduce

        self.meet(where)
        numbers = torch.tensor([number])
        all_reduce(numbers, ReduceOp.MAX, group=self.group)
        return int(numbers.item())

    def gathered(self, value: T, where: str) -> list[T]:
        """What each process brings to `where`, by its number."""
        if self.group is None:
            return [value]
        self.meet(where)
        return _gathered(value, self.group)

    def decided(self, decide: Callable[[], T], where: str) -> T:
        """What the first process decides, in all of them; its error ends them all, and the first says it."""
        if self.group is None:
            return decide()
        from torch.distributed import broadcast_object_list

        outcome = [_attempt(decide) if self.rank == 0 else None]
        self.meet(where)
        broadcast_object_list(outcome, src=0, group=self.group)
        assert outcome[0] is not None
        value, error = outcome[0]
        if error:
            raise self.told_once(error)
        assert value is not None
        return value

    def agreed(self, do: Callable[[], T], where: str) -> T:
        """What each process has done for itself; an error in any of them ends them all, and the first says it."""
        if self.group is None:
            return do()
        value, error = _attempt(do)
        errors = self.gathered(error, where)
        for number, each in enumerate(errors):
            if each:
                raise self.told_once(of_rank(each, number))
        assert value is not None
        return value

    def in_turn(self, do: Callable[[], T], where: str) -> T:
        """The same, the others after the first, whose files they find."""
        if self.rank == 0:
            done = self.agreed(do, where)
            self.agreed(lambda: True, where)
            return done
        self.agreed(lambda: True, where)
        return self.agreed(do, where)

    def told_once(self, error: CheckpointError) -> BaseException:
        """An error that all have: raised by the first, while the others end without a word."""
        return SystemExit(0) if self.rank else error

    def _missing(self, said: str, where: str, waited_s: float) -> CheckpointError:
        """What torch says (2.13): `Ranks 1, 2 failed to pass monitoredBarrier in 5000 ms`; only the first knows."""
        found = re.search(r"Ranks? ([\d, ]+) failed to pass", said)
        missing = [int(number) for number in found.group(1).split(",")] if found else [0]
        named = ", ".join(f"rank {number} ({self.names[number]})" for number in missing)
        if waited_s < self.timeout_s * 0.9 and "Timed out" not in said:
            return RankGone(self.run, f"{named} is gone before {where}", "its own error says why")
        problem = f"{named} did not come to {where} within {self.timeout_s:g} s"
        remedy = "see what its data or a callback does there (py-spy dump --pid N), or raise launch.timeout"
        return RankHangs(self.run, problem, remedy)


def peers(run: Path, timeout_s: float) -> Peers:
    """The processes that torch.distributed connects; this one alone where it connects none."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return Peers(run, timeout_s)
    group, names = _connected(distributed.group.WORLD, timeout_s)
    return Peers(run, timeout_s, group, distributed.get_rank(), names)


@cache
def _connected(world: Any, timeout_s: float) -> tuple[Any, tuple[str, ...]]:
    """A group for what is said between them, apart from that of the gradients, and the name of each process."""
    from torch.distributed import new_group

    group = new_group(backend="gloo", timeout=timedelta(seconds=timeout_s + LATER_S))
    return group, tuple(_gathered(f"process {os.getpid()} on {socket.gethostname()}", group))


@contextlib.contextmanager
def joined(run: Path, timeout_s: float, *, cpu: bool, backend: str | None, collective_s: float) -> Iterator[Peers]:
    """Connect this process with the others that a launcher has started; alone, there is nothing to connect.

    Their tensors travel by `backend`, by default the device's, and wait for `collective_s`. After an error nothing is
    taken apart in order: the others may never come to it.
    """
    if not is_one_of_several():
        yield Peers(run, timeout_s)
        return
    from accelerate import PartialState
    from torch import distributed

    is_ours = not distributed.is_initialized()
    PartialState(cpu=cpu, backend=backend, timeout=timedelta(seconds=collective_s))
    yield peers(run, timeout_s)
    if is_ours:
        _connected.cache_clear()
        distributed.destroy_process_group()


def of_rank(error: CheckpointError, number: int) -> CheckpointError:
    """The same error, saying in which process it arose, unless that is the first."""
    return type(error)(f"rank {number}: {error.path}", *error.args[1:]) if number else error


def plain(error: CheckpointError | OSError) -> CheckpointError:
    """The error as one that can be sent from one process to another."""
    if isinstance(error, CheckpointError):
        return error
    what = error.strerror.lower() if error.strerror else str(error).partition("\n")[0]
    return CheckpointError(error.filename or "train", what)


def _attempt(do: Callable[[], T]) -> tuple[T | None, CheckpointError | None]:
    try:
        return do(), None
    except (CheckpointError, OSError) as error:
        return None, plain(error)


def _gathered(value: T, group: Any) -> list[T]:
    from torch.distributed import all_gather_object, get_world_size

    values: list[Any] = [None] * get_world_size(group)
    all_gather_object(values, value, group=group)
    return values
