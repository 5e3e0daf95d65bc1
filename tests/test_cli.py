"""The command: what it prints, how it ends, and what it never imports."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import heads
import pytest
from snapshots import contents
from typer.testing import CliRunner

from tools.checkpoint import journal
from tools.cli import app
from tools.postprocess import STEPS
from tools.postprocess.fix_valuehead import fix_valuehead

runner = CliRunner()
HEAVY = {"torch", "transformers", "peft", "trl", "prefect", "numpy", "pydantic", "wandb", "yaml"}


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, tools.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not HEAVY & set(loaded)


@pytest.mark.parametrize("verb", ["fix-valuehead", "join-valuehead", "inspect", "bundle-processor", "convert-pissa"])
def test_safetensors_are_handled_without_torch(verb: str, tiny: Path, tmp_path: Path) -> None:
    path = heads.sharded(tiny, tmp_path / "checkpoint")
    options = {"bundle-processor": ["--from", str(Path(__file__).parent / "fixtures" / "hf-reward-model")]}
    if verb == "join-valuehead":
        fix_valuehead(path)
    if verb == "convert-pissa":
        import adapters

        run = adapters.train(tiny, tmp_path)
        path, options = run.adapter, {verb: ["--init", str(run.init)]}
    arguments = [verb, str(path), *options.get(verb, [])]
    code = f"import sys; from tools.cli import app; app({arguments!r}, standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "peft", "prefect", "safetensors"} & set(done.stdout.split())


@pytest.mark.parametrize("name", [*(step.__name__.replace("_", "-") for step in STEPS), "train"])
def test_every_command_explains_itself_with_an_example(name: str) -> None:
    done = runner.invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert f"Example: tools {name} " in done.output


def test_a_report_for_people_and_for_programs(tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    planned = runner.invoke(app, ["fix-valuehead", str(path), "--dry-run"])
    assert "would do: value head split out" in planned.output
    assert "model.safetensors: edit the header," in planned.output
    done = runner.invoke(app, ["fix-valuehead", str(path)])
    assert done.exit_code == 0
    assert done.output.startswith(f"{path}: value head split out (v_head.summary.bias, v_head.summary.weight)\n")
    assert "wrote value_head.safetensors; edited the header of model.safetensors" in done.output
    again = runner.invoke(app, ["fix-valuehead", str(path), "--json"])
    report = json.loads(again.output)
    assert report["step"] == "fix-valuehead"
    assert report["changed"] is False
    assert runner.invoke(app, ["fix-valuehead", str(path), "--quiet"]).output == ""


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["fix-valuehead", "nowhere"], 1, "error: nowhere: not found\n"),
        (["fix-valuehead"], 2, "Missing argument"),
        (["fix-valuehead", ".", "--nonsense"], 2, "No such option"),
        (["nonsense"], 2, "No such command"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(arguments: list[str], exit_code: int, message: str) -> None:
    done = runner.invoke(app, arguments)
    assert done.exit_code == exit_code
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_verbose_shows_the_traceback() -> None:
    done = runner.invoke(app, ["fix-valuehead", "nowhere", "--verbose"])
    assert done.exit_code == 1
    assert "Traceback" in done.stderr


def test_which_checkpoints_of_a_run(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for number in (9, 10, 11):
        heads.flat(tiny, run / f"checkpoint-{number}")
    refused = runner.invoke(app, ["fix-valuehead", str(run)])
    assert refused.exit_code == 1
    assert "checkpoint-9, checkpoint-10, checkpoint-11; name one, or add --checkpoint last, N or all" in refused.stderr
    runner.invoke(app, ["fix-valuehead", str(run), "--checkpoint", "last"])
    assert [(run / f"checkpoint-{n}/value_head.safetensors").exists() for n in (9, 10, 11)] == [False, False, True]
    before = contents(run)
    done = runner.invoke(app, ["fix-valuehead", str(run), "--checkpoint", "all", "-o", str(tmp_path / "out"), "--json"])
    assert [json.loads(line)["changed"] for line in done.output.splitlines()] == [True, True, True]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "checkpoint-10",
        "checkpoint-11",
        "checkpoint-9",
    ]
    assert contents(run) == before
    unknown = runner.invoke(app, ["fix-valuehead", str(run), "--checkpoint", "12"])
    assert "has no checkpoint 12: there are checkpoint-9" in unknown.stderr


@pytest.mark.parametrize(("which", "name"), [("0", "checkpoint-0"), ("5", "checkpoint-0005"), ("0007", "checkpoint-7")])
def test_a_checkpoint_of_a_run_by_its_number(which: str, name: str, tiny: Path, tmp_path: Path) -> None:
    for each in ("checkpoint-0", "checkpoint-0005", "checkpoint-7"):
        heads.flat(tiny, tmp_path / "run" / each)
    done = runner.invoke(app, ["fix-valuehead", str(tmp_path / "run"), "--checkpoint", which, "--json"])
    assert Path(json.loads(done.stdout)["path"]).name == name


def test_one_bad_checkpoint_of_a_run_does_not_hide_the_others(tiny: Path, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        heads.flat(tiny, tmp_path / "run" / f"checkpoint-{number}")
    (tmp_path / "run/checkpoint-2/model.safetensors").write_bytes(b"short")
    done = runner.invoke(app, ["fix-valuehead", str(tmp_path / "run"), "--checkpoint", "all"])
    assert done.exit_code == 1
    assert done.stdout.count("value head split out") == 2
    assert done.stderr.count("error: ") == 1


def test_a_busy_checkpoint_is_exit_code_3(tiny: Path, tmp_path: Path) -> None:
    path = heads.flat(tiny, tmp_path / "checkpoint")
    with journal.lock(path):
        done = subprocess.run(
            [sys.executable, "-m", "tools", "fix-valuehead", str(path)], capture_output=True, text=True, check=False
        )
    assert done.returncode == 3
    assert f"{path}: process {os.getpid()} (since " in done.stderr
    assert ") is changing it; try again later" in done.stderr
    assert runner.invoke(app, ["fix-valuehead", str(path)]).exit_code == 0


def test_an_interrupted_step_is_completed_and_said(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = heads.sharded(tiny, tmp_path / "checkpoint")

    def power_cut(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(journal, "write_receipt", power_cut)
        assert runner.invoke(app, ["fix-valuehead", str(path)]).exit_code == 130
    assert (path / ".burnish" / "commit.json").exists()
    done = runner.invoke(app, ["inspect", str(path)])
    assert "recovered: an interrupted fix-valuehead was completed" in done.output
    assert not (path / ".burnish" / "commit.json").exists()


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own with the built wheel in it and no extra."""
    folder = tmp_path_factory.mktemp("bare")
    root = Path(__file__).parents[1]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, root],
        check=True,
    )
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    wheel = next(folder.glob("burnish-*.whl"))
    constraints = ["-c", str(root / "constraints.txt")]
    subprocess.run([folder / "venv/bin/pip", "install", "-q", *constraints, wheel], check=True)
    return folder / "venv" / "bin"


def test_the_bare_wheel_inspects_and_names_the_extra_it_lacks(bare: Path, tmp_path: Path) -> None:
    path = shutil.copytree(Path(__file__).parent / "fixtures" / "trl-valuehead-sharded", tmp_path / "checkpoint")

    def tools(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([bare / "tools", *arguments], capture_output=True, text=True, check=False, cwd=tmp_path)

    assert tools("--help").returncode == 0
    assert "139,649 parameters in 23 tensors" in tools("inspect", "checkpoint").stdout
    assert tools("fix-valuehead", "checkpoint").returncode == 0
    lacking = tools("verify", "checkpoint", "--logits", "checkpoint")
    assert lacking.returncode == 1
    assert lacking.stderr == "error: tools verify needs transformers; pip install 'burnish[torch]'\n"
    lacking = tools("train", "config.yaml")
    assert lacking.returncode == 1
    assert "pip install 'burnish[train]'" in lacking.stderr
    found = subprocess.run(
        [bare / "python", "-c", "import tools, tasks, flows"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert found.returncode == 0, found.stderr
    assert path.exists()
