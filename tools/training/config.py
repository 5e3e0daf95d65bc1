# ruff: noqa: TID253 - the groups subclass pydantic's BaseModel; only code that trains imports this module
"""Configuration of a training run: typed groups, and where each value came from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from tools.checkpoint.errors import CheckpointError, all_of
from tools.training.config_source import Given, read_file, read_overrides, unknown_key, wanted
from tools.training.sources import digest, source_of

REPORTERS = ("wandb", "swanlab", "trackio", "tensorboard", "mlflow")

# Keys of `training` that change what is told about a run, or how fast it goes, and never what comes out of it.
WITHOUT_EFFECT = frozenset(
    [
        *("output_dir", "disable_tqdm", "log_level", "log_level_replica", "log_on_each_node", "logging_strategy"),
        *("logging_steps", "logging_first_step", "logging_nan_inf_filter", "skip_memory_metrics", "ddp_timeout"),
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor",),
    ]
)


def _listed(names: Any) -> Any:
    """`wandb` means `[wandb]`, and `none` means no reporter, as in transformers."""
    if names in (None, "none"):
        return []
    return [names] if isinstance(names, str) else names


def _expanded(text: str) -> str:
    return str(Path(text).expanduser()) if text.startswith("~") else text


def _template(given: Path | str) -> Path | str:
    """A file by its ending, else the name of a template."""
    return Path(given).expanduser() if str(given).endswith(".jinja") else str(given)


RowSource = Annotated[Path | str, AfterValidator(source_of)]
Positive = Annotated[int, Field(gt=0)]


class Group(BaseModel):
    """What all groups share: nothing unknown gets in, and nothing changes afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), coerce_numbers_to_str=True)


class ModelArguments(Group):
    """Which model is trained, and how it is loaded."""

    model_name_or_path: Annotated[str, AfterValidator(_expanded)] = Field(
        description="directory of the model, or its name on the hub"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="dtype of the loaded weights; auto: bfloat16 on a GPU that computes in it, else float32",
    )
    attn_implementation: str | None = Field(
        default=None, description="attention of transformers: eager, sdpa, flash_attention_2"
    )
    trust_remote_code: bool = Field(default=False, description="run the code that comes with the model")
    value_head: str | None = Field(
        default=None,
        description="head to start from: its name where the model has several, or new; by default the one it has",
    )


class DataArguments(Group):
    """Which rows are trained on, and how long they may be."""

    train_file: RowSource = Field(
        description="rows to train on: .jsonl, .json, .csv, .parquet, a directory, or OWNER/NAME[:SPLIT] on the hub"
    )
    eval_file: RowSource | None = Field(default=None, description="rows to evaluate on, given like train_file")
    subset: str | None = Field(default=None, description="configuration of a dataset on the hub that has several")
    template: Annotated[Path | str, AfterValidator(_template)] | None = Field(
        default=None, description="chat template: a name, or a .jinja file; by default the tokenizer's own"
    )
    max_length: Annotated[int, Field(gt=1)] = Field(default=1024, description="tokens a row may have; the rest is cut")
    max_samples: Positive | None = Field(
        default=None, description="use only the first rows of each file, for a quick try"
    )
    packing: bool = Field(
        default=False, description="put several rows into one sequence of max_length, none of which sees another"
    )


class FinetuningArguments(Group):
    """What is trained, and by which method."""

    stage: str = Field(default="sft", description="kind of training: sft, reward, or one that was added")
    method: Literal["lora", "full"] = Field(default="lora", description="train an adapter, or every weight")
    r: Positive = Field(default=8, description="rank of the adapter")
    lora_alpha: Annotated[float, Field(gt=0)] = Field(
        default=16, description="scale: alpha/r, with rslora alpha/sqrt(r)"
    )
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.0, description="dropout before the adapter")
    target_modules: str | list[str] = Field(
        default="all-linear", description="layers that get an adapter: names, or a regex"
    )
    init_lora_weights: bool | str = Field(
        default=True, description="start of the adapter, by PEFT's names: true, pissa, pissa_niter_4, olora, ..."
    )
    use_rslora: bool = Field(default=False, description="scale by alpha/sqrt(r)")
    use_dora: bool = Field(default=False, description="train direction and magnitude apart (DoRA)")
    modules_to_save: list[str] | None = Field(
        default=None, description="further modules trained in full, saved in the adapter"
    )

    @field_validator("stage")
    @classmethod
    def _known_stage(cls, stage: str) -> str:
        from tools.training.stages import STAGES

        if stage not in STAGES:
            raise ValueError(f"must be one of {', '.join(STAGES)}, not {stage!r}")
        return stage


class ReportArguments(Group):
    """Where the run is reported."""

    report_to: Annotated[list[str], BeforeValidator(_listed)] = Field(
        default=[], description=f"any of {', '.join(REPORTERS)}"
    )
    project: str = Field(default="burnish", description="project under which the run appears")
    run_name: str | None = Field(default=None, description="name of the run; by default that of its directory")

    @field_validator("report_to")
    @classmethod
    def _known_reporters(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in REPORTERS:
                raise ValueError(f"must be among {', '.join(REPORTERS)}, not {name!r}")
        return names


class TrainConfig(Group):
    """Everything a training run is made from; `training` holds fields of the stage's own config class."""

    model: ModelArguments
    data: DataArguments
    finetuning: FinetuningArguments = FinetuningArguments()
    training: dict[str, Any]
    report: ReportArguments = ReportArguments()

    @field_validator("training")
    @classmethod
    def _has_output_dir(cls, training: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(training.get("output_dir"), str):
            raise ValueError("needs output_dir, the directory of the run")
        return {**training, "output_dir": _expanded(training["output_dir"])}

    @property
    def run_dir(self) -> Path:
        """Directory that receives the checkpoints, the final model and the log."""
        return Path(self.training["output_dir"])


GROUPS: dict[str, type[Group]] = {
    "model": ModelArguments,
    "data": DataArguments,
    "finetuning": FinetuningArguments,
    "report": ReportArguments,
}
FIELDS: dict[str, frozenset[str]] = {name: frozenset(group.model_fields) for name, group in GROUPS.items()}


@dataclass(frozen=True)
class Resolved:
    """A configuration and the origin of each value: `FILE:LINE`, `override`, or `default (Burnish)`."""

    config: TrainConfig
    origins: dict[str, str]


def load_config(path: Path, overrides: Sequence[str] = ()) -> Resolved:
    """Read a YAML or JSON file, put `group.key=value` overrides over it, and check every value.

    A short `key=value` is understood where exactly one group has that field. The fields of `training` are checked
    against the stage's own config class when training starts. Raises CheckpointError naming file and line.
    """
    given = read_file(path, FIELDS)
    given |= read_overrides(overrides, FIELDS, given)
    unknown = [unknown_key(key, at.origin, FIELDS) for key, at in given.items() if not _is_known(key)]
    if unknown:
        raise all_of(unknown)
    nested: dict[str, dict[str, Any]] = {group: {} for group in [*GROUPS, "training"]}
    for dotted, at in given.items():
        group, _, key = dotted.partition(".")
        nested[group][key] = at.value
    try:
        config = TrainConfig.model_validate(nested)
    except ValidationError as error:
        raise all_of(_explained(error, given, path)) from None
    every_field = [f"{group}.{key}" for group, model in GROUPS.items() for key in model.model_fields]
    origins = dict.fromkeys(every_field, "default (Burnish)") | {key: at.origin for key, at in given.items()}
    return Resolved(config, origins)


def _is_known(dotted: str) -> bool:
    group, _, key = dotted.partition(".")
    return group == "training" or key in FIELDS.get(group, ())


def _explained(error: ValidationError, given: Mapping[str, Given], path: Path) -> list[CheckpointError]:
    """One line for each wrong value, in the user's words, at the place where it was given."""
    found: dict[str, CheckpointError] = {}
    for detail in error.errors():
        dotted = ".".join(map(str, detail["loc"][:2]))
        group, _, key = dotted.partition(".")
        if detail["type"] == "missing":
            found[dotted] = CheckpointError(path, f"{dotted} is missing", f"add {key} under {group}:")
        elif detail["type"] == "value_error":
            at = given[dotted].origin if dotted in given else str(path)
            found[dotted] = CheckpointError(at, f"{dotted} {detail['ctx']['error']}")
        elif detail["type"].startswith(("greater_", "less_")):
            must = detail["msg"].removeprefix("Input should be ")
            found[dotted] = CheckpointError(given[dotted].origin, f"{dotted} must be {must}, not {detail['input']!r}")
        else:
            must = wanted(GROUPS[group].model_fields[key].annotation)
            problem = f"{dotted} must be {must}, not {given[dotted].value!r}"
            found[dotted] = CheckpointError(given[dotted].origin, problem)
    return list(found.values())


def fingerprint(config: TrainConfig) -> dict[str, str]:
    """What determines the result of a run, flat: `{"finetuning.r": "8", "data.train_file": "sha256:...", ...}`.

    Data files count by content. `report`, the output directory and what only concerns logging are left out. Raises
    CheckpointError when a data file is not there.
    """
    prints = {}
    for group in ("model", "data", "finetuning"):
        for key, value in getattr(config, group):
            prints[f"{group}.{key}"] = digest(value) if isinstance(value, Path) else _canonical(value)
    for key, value in sorted(config.training.items()):
        if key not in WITHOUT_EFFECT:
            prints[f"training.{key}"] = _canonical(value)
    return prints


def _canonical(value: Any) -> str:
    """The same text for 2, 2.0 and "2.0": YAML reads `1e-4` as text and `1.0e-4` as a number."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    try:
        return f"{float(value):.17g}"
    except (TypeError, ValueError):
        return str(value)
