"""Wrong values of a configuration, alone or together: refused in one line, at their place, without a traceback."""

import json
from pathlib import Path

import pytest
from trl import SFTConfig

from tools.checkpoint.errors import CheckpointError
from tools.training.config import GROUPS, GeneratingArguments, load_config
from tools.training.config_rules import LIMITS, in_step
from tools.training.trainer_arguments import trainer_arguments


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {model_name_or_path: some/model}\n"
        "data: {train_file: rows.jsonl, eval_file: rows.jsonl}\n"
        "training: {output_dir: runs/a}\n"
    )
    return path


def refusal(path: Path, *overrides: str, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        trainer_arguments(load_config(path, overrides, environment or {}), SFTConfig)
    return str(caught.value)


ALONE = [
    ("learning_rate=-1", "training.learning_rate must be at least 0, not -1.0"),
    ("learning_rate=.nan", "training.learning_rate must be a finite number, not nan"),
    ("weight_decay=.inf", "training.weight_decay must be a finite number, not inf"),
    ("per_device_train_batch_size=0", "training.per_device_train_batch_size must be at least 1, not 0"),
    ("gradient_accumulation_steps=0", "training.gradient_accumulation_steps must be at least 1, not 0"),
    ("max_steps=-5", "training.max_steps must be at least 1, not -5; leave it out to go by num_train_epochs"),
    ("max_steps=0", "training.max_steps must be at least 1, not 0; leave it out to go by num_train_epochs"),
    ("max_steps=true", "training.max_steps must be a whole number, not True"),
    ("num_train_epochs=-1", "training.num_train_epochs must be at least 0, not -1.0"),
    (
        "num_train_epochs=0",
        "training.num_train_epochs is 0: nothing would be trained; write 1, or set training.max_steps",
    ),
    ("save_steps=0", "training.save_steps must be greater than 0, not 0.0"),
    ("save_total_limit=0", "training.save_total_limit must be at least 1, not 0"),
    ("seed=-1", "training.seed must be at least 0, not -1"),
    ("seed=99999999999", "training.seed must be at most 4.29497e+09, not 99999999999"),
    ("adam_beta1=1", "training.adam_beta1 must be at most 1, not 1.0"),
    ("eval_strategy=step", "training.eval_strategy must be one of no, steps, epoch, not 'step'; did you mean steps?"),
    ("save_strategy=never", "training.save_strategy must be one of no, steps, epoch, best, not 'never'"),
    ("r=true", "finetuning.r must be a whole number, not True"),
    ("lora_alpha=.inf", "finetuning.lora_alpha must be a finite number, not inf"),
    ("init_lora_weights=pisa", "finetuning.init_lora_weights must be true, false or one of gaussian, orthogonal, mica"),
    ("finetuning.rank_pattern={q_proj: 0}", "finetuning.rank_pattern must be greater than 0, not 0"),
    ("temperature=0", "generating.temperature must be greater than 0, not 0"),
    ("generating.top_p=2", "generating.top_p must be less than or equal to 1, not 2"),
    ("launch.processes=0", "launch.processes must be greater than 0, not 0"),
    ("processes=two", "launch.processes must be a whole number, not 'two'"),
    ("launch.timeout=0", "launch.timeout must be greater than 0, not 0"),
]


@pytest.mark.parametrize(("override", "problem"), ALONE)
def test_c1_a_value_that_no_run_can_have_is_refused(config, override, problem):
    said = refusal(config, override)
    assert said.startswith(f"override: {problem}")
    assert "\n" not in said


TOGETHER = [
    (["training.bf16=true", "training.fp16=true"], "training.fp16 and training.bf16 exclude each other"),
    (["training.bf16=true", "dtype=float16"], "training.bf16 is not the precision of a float16 model"),
    (["training.fp16=true", "dtype=bfloat16"], "training.fp16 is not the precision of a bfloat16 model"),
    (["method=full", "dtype=float16"], "model.dtype float16 weights cannot be trained in full"),
    (
        ["eval_file=null", "eval_strategy=steps"],
        "training.eval_strategy is steps, but there are no rows to evaluate on",
    ),
    (
        ["eval_file=null", "load_best_model_at_end=true"],
        "training.load_best_model_at_end compares evaluations, but there",
    ),
    (["eval_file=null", "save_strategy=best"], "training.save_strategy is best, but there are no rows"),
    (
        ["load_best_model_at_end=true", "save_strategy=steps", "eval_strategy=epoch"],
        "training.save_strategy is steps and training.eval_strategy epoch; training.load_best_model_at_end needs a",
    ),
    (["load_best_model_at_end=true", "eval_strategy=no"], "training.eval_strategy is no, and"),
    (
        ["load_best_model_at_end=true", "eval_strategy=steps", "eval_steps=4", "save_steps=10"],
        "training.save_steps is 10 and training.eval_steps 4; the best model can be loaded only if it was saved; "
        "write a multiple of 4",
    ),
    (
        ["save_only_model=true"],
        "training.save_only_model leaves out what a run that was stopped or killed goes on with",
    ),
    (["temperature=0.7"], "generating.temperature is read only when tokens are drawn; add generating.do_sample: true"),
    (["quantization=4bit", "method=full"], "model.quantization 4bit is for a base that is not trained"),
    (
        ["quantization=4bit", "init_lora_weights=pissa"],
        "finetuning.init_lora_weights pissa takes a part out of the base",
    ),
    (["init_lora_weights=loftq"], "finetuning.init_lora_weights loftq makes up for what 4-bit weights lose"),
    (["init_lora_weights=orthogonal", "r=3"], "finetuning.init_lora_weights orthogonal needs even ranks, and r is 3"),
    (["target_parameters=[a]", "init_lora_weights=pissa"], "finetuning.init_lora_weights pissa starts linear layers"),
    (
        ["target_parameters=[a]", "lora_dropout=0.1"],
        "finetuning.lora_dropout cannot be applied to finetuning.target_par",
    ),
    (["target_parameters=[a]", "use_dora=true"], "finetuning.use_dora is for layers"),
    (["init_lora_weights=eva", "finetuning.rank_pattern={a: 2}"], "finetuning.init_lora_weights eva finds the rank"),
    (["init_lora_weights=corda", "packing=true"], "finetuning.init_lora_weights corda looks at single rows, and those"),
    (["init_lora_weights=mica", "use_dora=true"], "finetuning.init_lora_weights mica and finetuning.use_dora are both"),
]


@pytest.mark.parametrize(("overrides", "problem"), TOGETHER)
def test_c1_values_that_exclude_each_other_are_refused_in_words(config, overrides, problem):
    said = refusal(config, *overrides)
    assert said.startswith(f"override: {problem}")
    assert "\n" not in said


def test_c1_every_limit_is_of_a_field_that_exists():
    assert LIMITS.keys() <= SFTConfig.__dataclass_fields__.keys()


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"logging_steps": 7},
        {"save_steps": 10},
        {"save_steps": 0.3},
        {"load_best_model_at_end": True},
        {"load_best_model_at_end": True, "logging_steps": 7},
        {"load_best_model_at_end": True, "save_steps": 10},
        {"load_best_model_at_end": True, "eval_steps": 10},
        {"save_strategy": "epoch", "load_best_model_at_end": True},
        {"eval_strategy": "epoch", "load_best_model_at_end": True},
        {"eval_strategy": "steps", "load_best_model_at_end": True},
        {"eval_strategy": "steps", "eval_steps": 5, "load_best_model_at_end": True},
        {"eval_strategy": "steps"},
        {"save_strategy": "no"},
    ],
)
def test_b3_evaluating_and_saving_are_kept_in_step(training):
    args = SFTConfig(output_dir="unused", use_cpu=True, **training | in_step(training, has_eval_rows=True))
    assert args.eval_strategy == args.save_strategy
    assert args.eval_strategy != "steps" or args.eval_steps == args.save_steps
    assert in_step(training, has_eval_rows=False) == {}


@pytest.mark.parametrize(
    ("training", "beside"),
    [
        ({"eval_strategy": "epoch"}, {}),
        ({"save_strategy": "epoch", "eval_strategy": "steps", "eval_steps": 5}, {}),
        ({"save_steps": 20, "eval_steps": 5}, {"eval_strategy": "steps"}),
        ({"save_strategy": "best"}, {"eval_strategy": "epoch"}),
        ({"save_strategy": "best", "eval_steps": 5}, {"eval_strategy": "steps"}),
        ({"save_strategy": "best", "load_best_model_at_end": True}, {"eval_strategy": "epoch"}),
    ],
)
def test_b3_what_is_given_stays_as_it_is(training, beside):
    assert in_step(training, has_eval_rows=True) == beside
    SFTConfig(output_dir="unused", use_cpu=True, **training, **beside)


def test_b3_a_part_of_a_run_may_be_a_multiple_of_another(config):
    best = ["load_best_model_at_end=true", "save_steps=0.3"]
    arguments = trainer_arguments(load_config(config, [*best, "eval_steps=0.1"], {}), SFTConfig)
    SFTConfig(use_cpu=True, **arguments | in_step(arguments, has_eval_rows=True))
    assert "training.save_steps is 0.3 and training.eval_steps 0.2" in refusal(config, *best, "eval_steps=0.2")


HOSTILE = {
    "control character": (b"model: {model_name_or_path: a\x01b}", "is not valid YAML: unacceptable character #x0001"),
    "not UTF-8": (b"model: {model_name_or_path: \xff}", "is not UTF-8 text: invalid start byte at byte 28"),
    "NUL": (b'model: {model_name_or_path: "a\\0b"}', ":1: has a character that no file name and no text can have"),
    "half a pair": (b'model: {model_name_or_path: "\\ud800"}', ":1: has a character that no file name and no text can"),
    "number as key": (
        b"model: {model_name_or_path: a}\ndata: {train_file: b}\ntraining: {output_dir: c, 1: 2}",
        ":3: unknown key training.1",
    ),
    "list as key": (b"training: {[a]: 2}", ":1: a key must be a name"),
    "mapping as group": (b"{a: b}: c", ":1: a key must be a name"),
    "huge number": (
        b"finetuning: {r: 1" + b"0" * 5000 + b"}",
        ":1: has a value that cannot be read: Exceeds the limit",
    ),
    "large number": (
        b"finetuning: {r: 1" + b"0" * 400 + b"}",
        ":1: finetuning.r must be less than 2147483648, not 1000",
    ),
    "given twice": (b"training:\n  seed: 1\n  seed: 2", ":3: seed is given twice, first on line 2"),
    "group twice": (b"data: {}\ndata: {}", ":2: data is given twice, first on line 1"),
    "short and long": (b"finetuning:\n  r: 1\nr: 2", ":3: finetuning.r is given twice, first on line 2"),
    "nested": (b"training: {a: " + b"[" * 5000 + b"]" * 5000 + b"}", "is nested too deeply"),
    "tag": (b"training: {a: !!python/object:os.system {}}", ":1: is not valid YAML: could not determine a constructor"),
    "alias in itself": (b"training: {a: &a [*a]}", ":1: "),
    "laughs": (
        b"x-a: &a [1,1,1,1,1,1,1,1,1,1]\nx-b: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\n"
        b"x-c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\nx-d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\n"
        b"training: {a: [*d,*d,*d,*d,*d,*d,*d,*d,*d,*d]}",
        ":5: has more than 100,000 values",
    ),
    "undefined alias": (b"training: *a", ":1: is not valid YAML: found undefined alias"),
    "two documents": (b"model: {}\n---\nmodel: {}", ":2: is not valid YAML: but found another document"),
    "a list": (b"- a", ":1: is not a mapping of keys to values"),
    "unknown short": (b"lerning_rate: 1", ":1: unknown key lerning_rate; did you mean training.learning_rate?"),
    "launch": (b"launch: {processes: 2.5}", ":1: launch.processes must be a whole number, not 2.5"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_c1_a_hostile_file_is_one_line(tmp_path, name):
    content, problem = HOSTILE[name]
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        trainer_arguments(load_config(path, environment={}), SFTConfig)
    assert any(line.startswith(str(path)) and problem in line for line in str(caught.value).splitlines()), caught.value


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", ":1: is not valid JSON"),
        ('{"model": {"dtype": "a", "dtype": "b"}}', ":1: dtype is given twice"),
        ('{"finetuning": {"r": 1' + "0" * 5000 + "}}", "cannot be read"),
        ("[" * 100000, "is nested too deeply"),
        ("[1]", ":1: is not a mapping of keys to values"),
    ],
)
def test_c1_hostile_json_is_one_line(tmp_path, content, problem):
    path = tmp_path / "run.json"
    path.write_text(content)
    assert problem in refusal(path)


def test_c1_json_numbers_and_characters_are_those_of_json(tmp_path):
    path = tmp_path / "run.json"
    groups = {"model": {"model_name_or_path": "\U0001f600"}, "data": {"train_file": "a"}}
    path.write_text(json.dumps({**groups, "training": {"output_dir": "b", "learning_rate": 1e-4}}))
    config = load_config(path, environment={}).config
    assert (config.model.model_name_or_path, config.training["learning_rate"]) == ("\U0001f600", 1e-4)


def test_c1_merge_keys_are_read_with_the_lines_of_what_they_merge(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "x-small: &small\n  learning_rate: 1.0e-3\n  seed: 7\n"
        "model: {model_name_or_path: a}\ndata: {train_file: b}\n"
        "training:\n  <<: *small\n  seed: 8\n  output_dir: c\n"
    )
    resolved = load_config(path, environment={})
    assert resolved.config.training == {"learning_rate": 1e-3, "seed": 8, "output_dir": "c"}
    assert resolved.origins["training.learning_rate"] == f"{path}:2"
    assert resolved.origins["training.seed"] == f"{path}:8"


def test_c1_short_names_are_understood_in_a_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model_name_or_path: a\ntrain_file: b\nr: 4\nlearning_rate: 1.0e-3\ntraining: {output_dir: c}\n")
    resolved = load_config(path, environment={})
    assert (resolved.config.finetuning.r, resolved.config.training["learning_rate"]) == (4, 1e-3)
    assert resolved.origins["finetuning.r"] == f"{path}:3"


def test_c1_the_environment_wins_over_the_file_and_an_override_over_both(config):
    environment = {"BURNISH_TRAINING__SEED": "3", "BURNISH_FINETUNING__R": "4", "BURNISH_HOME": "/x", "HOME": "/y"}
    resolved = load_config(config, ["r=16"], environment)
    assert (resolved.config.training["seed"], resolved.config.finetuning.r) == (3, 16)
    assert resolved.origins["training.seed"] == "environment BURNISH_TRAINING__SEED"
    assert resolved.origins["finetuning.r"] == "override"
    assert refusal(config, environment={"BURNISH_FINETUNING__RANK_PATERN": "1"}) == (
        "environment BURNISH_FINETUNING__RANK_PATERN: unknown key finetuning.rank_patern; "
        "did you mean finetuning.rank_pattern?"
    )
    assert "did you mean finetuning?" in refusal(config, environment={"BURNISH_FINETUNNING__R": "1"})
    for name in ("BURNISH_SEED", "BURNISH_TRAINING_SEED"):
        expected = f"{name}: is not read: a group stands before two underscores; write BURNISH_TRAINING__SEED"
        assert refusal(config, environment={name: "1"}) == expected
    assert refusal(config, "model.value_head=new").startswith("override: model.value_head is of a reward model")


def test_c1_generating_is_passed_on_by_the_names_of_transformers():
    from transformers import GenerationConfig

    known = vars(GenerationConfig())
    assert GROUPS["generating"].model_fields.keys() <= known.keys()
    assert GeneratingArguments().settings() == {
        "max_new_tokens": 128,
        "do_sample": False,
        "num_beams": 1,
        "repetition_penalty": 1.0,
    }
    assert GeneratingArguments(do_sample=True, temperature=0.7).settings()["temperature"] == 0.7
