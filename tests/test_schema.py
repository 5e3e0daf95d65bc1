"""The JSON schema of a configuration, and what prints it with its origins."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from tools.cli import app
from tools.training import schema
from tools.training.config import GROUPS, load_config

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def test_c1_the_schema_is_that_of_the_groups_and_the_stages():
    """After a change of a group, or of a library's config class: `make schema`."""
    assert schema.FILE.read_text() == schema.make()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_c1_the_examples_are_valid_and_name_the_schema(example):
    as_editors_read = re.sub(r": (\d+)e", r": \1.0e", example.read_text())  # YAML 1.2, where `1e-4` is a number
    jsonschema.validate(yaml.safe_load(as_editors_read), schema.written())
    named = re.search(r"^# yaml-language-server: \$schema=(\S+)$", example.read_text(), re.MULTILINE)
    assert named
    assert (example.parent / named[1]).resolve() == schema.FILE.resolve()


def test_c1_the_schema_refuses_what_the_configuration_refuses():
    valid = {"model": {"model_name_or_path": "a"}, "data": {"train_file": "b"}, "training": {"output_dir": "c"}}
    jsonschema.validate(valid, schema.written())
    for group, key, value in [
        ("model", "dtyp", 1),
        ("finetuning", "r", "x"),
        ("training", "optim", "adam"),
        ("x", "y", 1),
    ]:
        changed = json.loads(json.dumps(valid))
        changed.setdefault(group, {})[key] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(changed, schema.written())


def test_c1_every_property_is_described():
    for group in schema.written()["properties"].values():
        assert group["description"]
    for group in GROUPS:
        assert all(field["description"] for field in schema.written()["properties"][group]["properties"].values())


def test_c1_names_of_trainer_fields_are_known_without_torch():
    code = (
        "import sys; from tools.training.schema import trainer_fields, values_schema; values_schema(); "
        "assert {'learning_rate', 'loss_type'} <= trainer_fields(); "
        "assert 'report_to' not in trainer_fields(); "
        "assert not {'torch', 'transformers', 'trl', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_c1_the_form_of_a_deployment_has_every_key_and_needs_no_torch():
    code = (
        "import sys; from flows.post_train import post_train; "
        "form = post_train.parameters.properties['values']; "
        "assert form['properties']['finetuning']['properties']['r']['description']; "
        "assert form['properties']['training']['properties']['learning_rate']['type'] == 'number'; "
        "assert not any(group['required'] for group in form['properties'].values()); "
        "assert not {'torch', 'transformers', 'trl'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_c1_what_the_form_says_replaces_the_values_of_the_file():
    from flows.post_train import as_overrides, post_train

    values = {"finetuning": {"r": 4, "target_modules": ["q_proj"]}, "training": {"learning_rate": 1e-05}}
    values["model"] = {"model_name_or_path": "m\U0001f600"}
    parameters = post_train.validate_parameters({"config": "a.yaml", "values": values})
    config = load_config(ROOT / "examples" / "sft.yaml", as_overrides(parameters["values"])).config
    assert (config.finetuning.r, config.finetuning.target_modules) == (4, ["q_proj"])
    assert float(config.training["learning_rate"]) == 1e-05
    assert config.model.model_name_or_path == "m\U0001f600"


def test_c1_show_prints_every_value_with_its_origin_and_is_a_configuration_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_TRAINING__SEED", "7")
    example = ROOT / "examples" / "sft.yaml"
    done = CliRunner().invoke(app, ["train", str(example), "r=4", "--show"])
    assert done.exit_code == 0, done.output
    lines = {line.split(":")[0].strip(): line for line in done.stdout.splitlines()}
    assert re.search(r"r: 4 +# override$", lines["r"])
    assert re.search(r"max_steps: 20 +# \S+sft\.yaml:\d+$", lines["max_steps"])
    assert re.search(r"seed: 7 +# environment BURNISH_TRAINING__SEED$", lines["seed"])
    assert lines["max_length"].endswith(f"# {example}:{_line(example, 'max_length')}")
    assert re.search(r"lora_dropout: 0\.0 +# default \(Burnish\)$", lines["lora_dropout"])
    assert re.search(r"weight_decay: 0\.0 +# default \(transformers [\d.]+\)$", lines["weight_decay"])
    assert re.search(r"loss_type: nll +# default \(trl [\d.]+\)$", lines["loss_type"])
    monkeypatch.delenv("BURNISH_TRAINING__SEED")
    again = tmp_path / "again.yaml"
    again.write_text(done.stdout)
    first, second = load_config(example, ["r=4"]).config, load_config(again).config
    assert (first.model, first.data, first.finetuning) == (second.model, second.data, second.finetuning)
    assert CliRunner().invoke(app, ["train", str(again), "--show"]).exit_code == 0


def test_c1_show_refuses_what_training_refuses():
    done = CliRunner().invoke(app, ["train", str(ROOT / "examples" / "sft.yaml"), "learning_rate=-1", "--show"])
    assert done.exit_code == 1
    assert done.stderr == "error: override: training.learning_rate must be at least 0, not -1.0\n"


def _line(path: Path, key: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if f"{key}:" in line)
