"""The configuration of a training run: what is understood, what is refused, and where each value came from."""

import json
from pathlib import Path

import pytest

from tools.checkpoint.errors import CheckpointError
from tools.training.config import GROUPS, load_config
from tools.training.fingerprint import fingerprint
from tools.training.trainer_arguments import trainer_arguments

RUN = """\
model:
  model_name_or_path: some/model
data:
  train_file: {data}
finetuning:
  r: 4
training:
  output_dir: runs/a
  learning_rate: 1e-4
"""


@pytest.fixture
def write(tmp_path):
    """Write a config next to one row of data; `changes` are put into its text."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')

    def write(*changes: tuple[str, str], more: str = "") -> Path:
        text = RUN.format(data=tmp_path / "rows.jsonl") + more
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def refusal(*args) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_config(*args)
    return str(caught.value)


def test_yaml_and_json_give_the_same_configuration(write, tmp_path):
    import yaml

    path = write()
    twin = tmp_path / "run.json"
    twin.write_text(json.dumps(yaml.safe_load(path.read_text()), indent="\t"))
    assert load_config(twin).config == load_config(path).config
    assert load_config(twin).origins["finetuning.r"] == f"{twin}:9"


def test_every_value_has_an_origin(write):
    path = write()
    origins = load_config(path, ["finetuning.method=full"]).origins
    assert origins["finetuning.r"] == f"{path}:6"
    assert origins["training.learning_rate"] == f"{path}:9"
    assert origins["finetuning.method"] == "override"
    assert origins["data.max_length"] == "default (Burnish)"
    assert {f"{name}.{field}" for name, group in GROUPS.items() for field in group.model_fields} <= origins.keys()


def test_an_override_wins_over_the_file(write):
    config = load_config(write(), ["finetuning.r=16", "target_modules=[q_proj, v_proj]", "training.seed=7"]).config
    assert config.finetuning.r == 16
    assert config.finetuning.target_modules == ["q_proj", "v_proj"]
    assert config.training["seed"] == 7


def test_the_last_of_two_overrides_wins(write):
    assert load_config(write(), ["r=16", "r=32"]).config.finetuning.r == 32


@pytest.mark.parametrize("short", ["learning_rate=3", "warmup_steps=3"])
def test_a_short_name_reaches_the_trainer_whether_or_not_the_file_has_it(write, short):
    assert load_config(write(), [short]).config.training[short.partition("=")[0]] == 3


def test_an_ambiguous_short_name_is_refused_with_its_meanings(write):
    path = write(more="  run_name: a\n")
    assert refusal(path, ["run_name=b"]) == (
        "override: run_name could be report.run_name or training.run_name; write the one you mean"
    )


def test_an_override_without_a_value_is_refused(write):
    assert refusal(write(), ["finetuning.r"]) == "finetuning.r: is no override; write group.key=value"


@pytest.mark.parametrize(
    ("change", "line", "problem"),
    [
        (("r: 4", "lora_alfa: 4"), 6, "unknown key finetuning.lora_alfa; did you mean finetuning.lora_alpha?"),
        (("r: 4", "max_length: 4"), 6, "unknown key finetuning.max_length; did you mean data.max_length?"),
        (("finetuning:", "fine_tuning:"), 5, "unknown key fine_tuning; did you mean finetuning?"),
        (
            ("  learning_rate: 1e-4", "report:\n  xyz: 1"),
            10,
            "unknown key report.xyz; report has callbacks, gradient_norms, memory, project, report_to, "
            "run_name, samples, samples_every",
        ),
        (("r: 4", "r: 4\n  r: 8"), 7, "r is given twice, first on line 6"),
        (("r: 4", "r: [4"), 7, "is not valid YAML: expected ',' or ']', but got ':'"),
        (("\n  r: 4", " 4"), 5, "is not a mapping of keys to values"),
        (("r: 4", "r: eight"), 6, "finetuning.r must be a whole number, not 'eight'"),
        (("r: 4", "r: 2.5"), 6, "finetuning.r must be a whole number, not 2.5"),
        (("r: 4", "r: 0"), 6, "finetuning.r must be greater than 0, not 0"),
        (("r: 4", "use_dora: maybe"), 6, "finetuning.use_dora must be true or false, not 'maybe'"),
        (("r: 4", "method: qlora"), 6, "finetuning.method must be one of lora, full, not 'qlora'"),
        (("r: 4", "modules_to_save: a"), 6, "finetuning.modules_to_save must be a list or null, not 'a'"),
    ],
)
def test_a_mistake_is_one_line_at_its_place(write, change, line, problem):
    path = write(change)
    assert refusal(path) == f"{path}:{line}: {problem}"


def test_an_unknown_stage_is_refused_with_those_that_exist(write):
    assert "finetuning.stage must be one of sft, reward" in refusal(write(), ["stage=stf"])


def test_an_unknown_reporter_is_refused(write):
    assert "report.report_to must be among wandb" in refusal(write(), ["report_to=wandbb"])


@pytest.mark.parametrize(
    ("given", "reporters"), [("none", []), ("wandb", ["wandb"]), ("[wandb, mlflow]", ["wandb", "mlflow"])]
)
def test_reporters_are_given_as_in_transformers(write, given, reporters):
    assert load_config(write(), [f"report_to={given}"]).config.report.report_to == reporters


def test_all_mistakes_are_told_at_once(write):
    lines = refusal(write(("r: 4", "r: x")), ["lora_dropout=2"]).splitlines()
    assert len(lines) == 2


@pytest.mark.parametrize("missing", ["model_name_or_path: some/model", "output_dir: runs/a"])
def test_what_must_be_given_is_named_when_missing(write, missing):
    assert missing.partition(":")[0] in refusal(write((missing, "")))


def test_a_file_that_is_not_there_is_not_found(tmp_path):
    assert refusal(tmp_path / "no.yaml") == f"{tmp_path / 'no.yaml'}: not found"


def test_numbers_that_yaml_takes_for_text_are_numbers(write):
    config = load_config(write(), ["lora_dropout=1e-1"]).config
    assert config.training["learning_rate"] == "1e-4"  # as YAML 1.1 reads it; the stage's class says what it is
    assert config.finetuning.lora_dropout == 0.1


def test_home_is_expanded(write):
    config = load_config(write(), ["output_dir=~/runs", "model_name_or_path=~/m", "train_file=~/t.jsonl"]).config
    assert config.run_dir == Path.home() / "runs"
    assert config.model.model_name_or_path == str(Path.home() / "m")
    assert config.data.train_file == Path.home() / "t.jsonl"


def test_every_field_says_what_it_is_for():
    for group in GROUPS.values():
        assert all(field.description for field in group.model_fields.values())


def arguments(path, *overrides):
    from trl import SFTConfig

    return trainer_arguments(load_config(path, overrides), SFTConfig)


def test_trainer_fields_get_the_type_that_their_class_declares(write):
    given = arguments(write(), "training.max_steps=3", "training.bf16=true", "training.lr_scheduler_kwargs={a: 1}")
    assert given == {
        "output_dir": "runs/a",
        "learning_rate": 1e-4,
        "max_steps": 3,
        "bf16": True,
        "lr_scheduler_kwargs": {"a": 1},
    }


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("training.lerning_rate=1", "unknown key training.lerning_rate; did you mean training.learning_rate?"),
        ("training.max_steps=2.5", "training.max_steps must be a whole number, not 2.5"),
        ("training.report_to=wandb", "training.report_to is not read from here; write report.report_to"),
        ("training.max_length=9", "training.max_length is not read from here; write data.max_length"),
        ("training.packing=true", "training.packing is not read from here; write data.packing"),
    ],
)
def test_a_trainer_field_that_cannot_be_is_refused_with_the_reason(write, override, problem):
    with pytest.raises(CheckpointError) as caught:
        arguments(write(), override)
    assert str(caught.value) == f"override: {problem}"


def prints(path, *overrides) -> dict[str, str]:
    from trl import SFTConfig

    return fingerprint(load_config(path, overrides).config, SFTConfig)


def test_fingerprint_ignores_where_and_how_a_run_is_told(write):
    elsewhere = [
        "output_dir=b",
        "report_to=wandb",
        "project=p",
        "training.logging_steps=9",
        "training.disable_tqdm=true",
    ]
    assert prints(write()) == prints(write(), *elsewhere)


def test_fingerprint_names_what_determines_the_result(write):
    assert prints(write())["finetuning.r"] == "4"
    first, second = prints(write()), prints(write(), "r=8", "training.seed=1")
    assert {key for key in first | second if first.get(key) != second.get(key)} == {"finetuning.r", "training.seed"}


def test_fingerprint_follows_the_content_of_the_data_and_not_its_name(write, tmp_path):
    before = prints(write())
    (tmp_path / "rows.jsonl").rename(tmp_path / "moved.jsonl")
    moved = prints(write(("rows.jsonl", "moved.jsonl")))
    (tmp_path / "moved.jsonl").write_text('{"text": "b"}\n')
    assert before == moved
    assert prints(write(("rows.jsonl", "moved.jsonl"))) != before


@pytest.mark.parametrize("rate", ["0.0001", "1.0e-4", "'1e-4'"])
def test_fingerprint_is_that_of_the_number_however_written(write, rate):
    assert prints(write()) == prints(write(), f"learning_rate={rate}")


def test_fingerprint_of_missing_data_is_refused(write):
    with pytest.raises(CheckpointError, match=r"gone\.jsonl: not found"):
        prints(write(("rows.jsonl", "gone.jsonl")))


@pytest.mark.parametrize("example", ["sft.yaml", "reward.yaml"])
def test_the_examples_are_valid(example):
    from tools.training.stages import load_stage

    resolved = load_config(Path(__file__).parent.parent / "examples" / example)
    given = trainer_arguments(resolved, load_stage(resolved.config.finetuning.stage).ARGUMENTS)
    assert given["output_dir"] == f"runs/{Path(example).stem}"
