"""Callbacks of one's own by dotted path, and those of ours that a run gets."""

from pathlib import Path

import pytest
from runs import reward
from transformers import TrainerCallback

from tools.checkpoint.errors import CheckpointError
from tools.training import callbacks
from tools.training.callbacks.chosen import chosen, own
from tools.training.config import load_config
from tools.training.train import train

OWN = '''
from transformers import TrainerCallback

class Count(TrainerCallback):
    """Writes how often it was called."""

    def __init__(self, file="count", by=1):
        self.file, self.by, self.steps = file, by, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += self.by

    def on_train_end(self, args, state, control, **kwargs):
        with open(self.file, "w") as file:
            file.write(str(self.steps))

by_tens = Count("tens", by=10)
function = len
'''


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that lies in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry])
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    return name


def test_b6_classes_with_arguments_and_instances_are_added_by_dotted_path(config: Path, own_module: str) -> None:
    given = f"[{{path: {own_module}.Count, args: {{file: twos, by: 2}}}}, {own_module}.by_tens, {own_module}.Count]"
    train(config, [f"report.callbacks={given}"])
    assert [Path(name).read_text() for name in ("twos", "tens", "count")] == ["12", "60", "6"]


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("import no_such_library", "{name} needs no_such_library, which is not installed; install what has"),
        ("class (", "{name} cannot be imported (SyntaxError: invalid syntax"),
        ("raise KeyError('a\\nb')", "{name} cannot be imported (KeyError: 'a"),
        ("import sys; raise ValueError('two\\nlines')", "{name} cannot be imported (ValueError: two)"),
    ],
)
def test_b6_a_module_that_cannot_be_imported_is_one_line(tmp_path: Path, monkeypatch, module: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"broken_{abs(hash(module))}"
    (tmp_path / f"{name}.py").write_text(module)
    with pytest.raises(CheckpointError) as caught:
        own(f"{name}.Name", {})
    assert str(caught.value).startswith(f"report.callbacks: {said.format(name=name)}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nowhere_at_all.Name", "there is no module nowhere_at_all"),
        ("Name", "is no dotted path; write package.module.Name"),
        ("{own}.Missing", "has no Missing"),
        ("{own}.function", "is no TrainerCallback"),
        ("{{path: {own}.Count, args: {{wrong: 1}}}}", "does not take args {{'wrong': 1}}"),
        ("{{path: {own}.by_tens, args: {{by: 1}}}}", "is an object and takes no args"),
        ("{{args: {{by: 1}}}}", "must each have path"),
        ("{{path: {own}.Count, arguments: {{}}}}", "must each have path, and args as a mapping"),
    ],
)
def test_b6_what_is_no_callback_is_refused_in_one_line(config: Path, own_module: str, given: str, said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        train(config, [f"report.callbacks={given.format(own=own_module)}", "max_steps=1"])
    assert "report.callbacks" in str(caught.value)
    assert said.format() in str(caught.value)
    assert "\n" not in str(caught.value)


def names(config: Path, *overrides: str) -> list[str]:
    with chosen(load_config(config, overrides).config, "run") as told:
        return [type(callback).__name__ for callback in told.callbacks]


def test_a8_every_stage_gets_log_reporter_and_what_its_method_needs(config: Path) -> None:
    for overrides in ([], reward(config)):
        assert {"LogCallback", "ReporterCallback", "StopCallback", "NonFiniteCallback"} <= set(
            names(config, *overrides)
        )
    assert "InitialAdapterCallback" not in names(config)
    assert "InitialAdapterCallback" in names(config, "finetuning.init_lora_weights=pissa")
    assert "InitialAdapterCallback" not in names(config, "finetuning.init_lora_weights=pissa", "method=full")


def test_a8_what_measures_comes_before_what_tells(config: Path) -> None:
    found = names(config, "report.gradient_norms=true", "report.report_to=tensorboard")
    order = ["GradientNormsCallback", "Guarded_tensorboard", "LogCallback", "ReporterCallback", "StopCallback"]
    assert [name for name in found if name in order] == order


def test_a6_a7_every_callback_is_importable_by_its_name() -> None:
    for name in filter(lambda name: name.endswith("Callback"), callbacks.__all__):
        assert issubclass(getattr(callbacks, name), TrainerCallback)
    with pytest.raises(AttributeError):
        _ = callbacks.Nothing
