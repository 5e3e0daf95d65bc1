"""Nothing is ever lost: steps killed and cut from power at every system call. `make torture` tries all of them.

One layout for each way in which a directory changes. Without strace these tests fail; `make test` then leaves them out
and says so.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from torture import kills
from torture.cases import all_cases
from torture.laws import Subject
from torture.power import Power
from torture.trace import Runner

pytestmark = pytest.mark.strace
CASES = (
    "fix-valuehead flat",  # one header edited
    "fix-valuehead sharded",  # several files change, the index is moved aside
    "convert-pissa",  # files replaced, adapter_config.json moved aside
    "fix-valuehead after bundle-processor",  # a checkpoint that has records already
    "fix-valuehead flat --output",  # a new directory
)


@pytest.fixture(scope="module", params=CASES)
def subject(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    case = all_cases(tiny)[request.param]()
    with Runner() as runner:
        yield Subject(case, tmp_path_factory.mktemp("torture") / "run", runner)


def test_a_kill_at_any_call_leaves_old_or_new_and_the_step_completes(subject: Subject) -> None:
    points, broken = kills.kill_everywhere(subject, kills.calls_of(subject))
    assert broken == []
    assert points > 40


def test_a_power_cut_at_any_call_leaves_old_or_new_and_the_step_completes(subject: Subject) -> None:
    power = Power.record(subject)
    assert list(power.cut_everywhere()) == []
    assert power.states > 100


def test_without_any_one_fsync_a_power_cut_loses_something(tiny: Path, tmp_path: Path) -> None:
    needed: dict[str, bool] = {}
    for name in ("convert-pissa", "fix-valuehead after bundle-processor", "fix-valuehead flat --output"):
        with Runner() as runner:
            power = Power.record(Subject(all_cases(tiny)[name](), tmp_path / "run", runner))
            for place, is_needed in power.needed_flushes():
                needed[place] = needed.get(place, False) or is_needed
    assert len(needed) > 15
    assert {place for place, is_needed in needed.items() if not is_needed} == set()
