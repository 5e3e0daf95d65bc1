# ruff: noqa: TID253 - the groups subclass pydantic's BaseModel; only code that trains imports this module
"""Configuration of a training run: typed groups, and where each value came from."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from tools.checkpoint.errors import all_of
from tools.training.config_errors import explained, wanted
from tools.training.config_rules import broken_rules
from tools.training.config_source import read_environment, read_file, read_overrides, unknown_key
from tools.training.sources import source_of

SAMPLING = ("temperature", "top_p", "top_k")  # fields of `generating` that are read only when tokens are drawn
FROM_DATA = ("eva", "corda", "lora_ga")  # inits that look at data; the last two take a part out of the base
INITS = (
    *("gaussian", "orthogonal", "mica"),  # leave the base as it is
    *("pissa", "pissa_niter_4", "olora"),  # take a part out of it
    *FROM_DATA,
    "loftq",  # of a quantised base
)
REPORTERS = ("wandb", "swanlab", "trackio", "tensorboard", "mlflow")


def _listed(names: Any) -> Any:
    """`wandb` means `[wandb]`, and `none` means no reporter, as in transformers."""
    if names in (None, "none"):
        return []
    return [names] if isinstance(names, str) else names


def _callbacks(given: Any) -> Any:
    """A bare path is a callback without arguments."""
    given = given if isinstance(given, list) else [given]
    called = [{"path": each} if isinstance(each, str) else each for each in given]
    for each in called:
        names = set(each) if isinstance(each, dict) else {""}
        if "path" not in names or names - {"path", "args"} or not isinstance(each.get("args", {}), dict):
            raise ValueError(f"must each have path, and args as a mapping, not {each!r}")
    return called


def _expanded(text: str) -> str:
    return str(Path(text).expanduser()) if text.startswith("~") else text


ONE_OR_MORE = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
Positive = Annotated[int, Field(gt=0, lt=2**31)]


def _template(given: Path | str) -> Path | str:
    """A file by its ending, else the name of a template."""
    return Path(given).expanduser() if str(given).endswith(".jinja") else str(given)


RowSource = Annotated[Path | str, AfterValidator(source_of)]


class Group(BaseModel):
    """What all groups share: nothing unknown gets in, and nothing changes afterwards."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), coerce_numbers_to_str=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, value: Any, about: ValidationInfo) -> Any:
        """`true` is no number, though Python takes it for 1."""
        annotation = cls.model_fields[str(about.field_name)].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError(f"must be {wanted(annotation)}, not {value!r}")
        return value


class ModelArguments(Group):
    """Which model is trained, and how it is loaded."""

    model_name_or_path: Annotated[str, AfterValidator(_expanded)] = Field(
        description="directory of the model, or its name on the hub"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="dtype of the loaded weights; auto: as the device computes, float32 where all weights are trained",
    )
    attn_implementation: str | None = Field(
        default=None, description="attention of transformers: eager, sdpa, flash_attention_2"
    )
    quantization: Literal["4bit", "8bit"] | None = Field(
        default=None, description="the base is held in so many bits by bitsandbytes, on a CUDA GPU, for an adapter"
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
    eval_file: RowSource | None = Field(
        default=None,
        description="rows to evaluate on, given like train_file; at each save, unless training.eval_strategy is set",
    )
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
        default="all-linear", description="layers that get an adapter: all-linear (but the output head), names, a regex"
    )
    exclude_modules: str | list[str] | None = Field(default=None, description="layers that get none: names, or a regex")
    target_parameters: list[str] | None = Field(
        default=None, description="parameters that get one, such as mlp.experts.down_proj of a mixture of experts"
    )
    rank_pattern: dict[str, Positive] = Field(default={}, description="other ranks: name or regex of layers to rank")
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={}, description="other lora_alpha: name or regex of layers to number"
    )
    init_lora_weights: bool | str = Field(
        default=True,
        description="start of the adapter, by PEFT's names: true, gaussian, orthogonal, mica, pissa, pissa_niter_4, "
        "olora, eva, corda, lora_ga, loftq",
    )
    calibration_rows: Positive = Field(
        default=64, description="rows of train_file that an init which looks at data (eva, corda, lora_ga) sees"
    )
    use_rslora: bool = Field(default=False, description="scale by alpha/sqrt(r)")
    use_dora: bool = Field(default=False, description="train direction and magnitude apart (DoRA)")
    bias: Literal["none", "all", "lora_only"] = Field(default="none", description="biases that are trained as well")
    modules_to_save: list[str] | None = Field(
        default=None, description="further modules trained in full, saved in the adapter"
    )
    ensure_weight_tying: bool = Field(
        default=False, description="keep tied embeddings tied when one of them is trained or gets an adapter"
    )

    early_stopping_patience: Positive | None = Field(
        default=None, description="end after so many evaluations in a row that are no better than the best"
    )
    early_stopping_threshold: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="by how much an evaluation must be better to count"
    )

    @field_validator("stage")
    @classmethod
    def _known_stage(cls, stage: str) -> str:
        from tools.training.stages import STAGES

        if stage not in STAGES:
            raise ValueError(f"must be one of {', '.join(STAGES)}, not {stage!r}")
        return stage

    @field_validator("init_lora_weights")
    @classmethod
    def _known_init(cls, init: bool | str) -> bool | str:
        if isinstance(init, str) and init not in INITS and not re.fullmatch(r"pissa_niter_[1-9]\d?", init):
            raise ValueError(f"must be true, false or one of {', '.join(INITS)}, not {init!r}")
        return init


class GeneratingArguments(Group):
    """How text is generated while training goes on: for its samples, by the names of transformers' GenerationConfig."""

    max_new_tokens: Positive = Field(default=128, description="tokens that are generated at most")
    do_sample: bool = Field(
        default=False, description="draw each token; false takes the likeliest, the same every time"
    )
    temperature: Annotated[float, Field(gt=0)] = Field(default=1.0, description="below 1 keeps closer to the likeliest")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="draw among the likeliest tokens that have this probability together"
    )
    top_k: Annotated[int, Field(ge=0)] = Field(default=50, description="draw among so many likeliest tokens; 0: all")
    num_beams: Positive = Field(default=1, description="beams of the search; 1: none")
    repetition_penalty: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="above 1, what was said already becomes less likely"
    )

    def settings(self) -> dict[str, Any]:
        """The arguments for `model.generate`; what only sampling reads is left out when nothing is drawn."""
        return self.model_dump(exclude=set() if self.do_sample else set(SAMPLING))


class CallbackArguments(Group):
    """A callback of the user's own: a class that `args` are given to, or an object that is one."""

    path: str = Field(description="where Python finds it: package.module.Name")
    args: dict[str, Any] = Field(default={}, description="arguments of the class")


class ReportArguments(Group):
    """Where the run is reported, what is watched, and who else is told."""

    report_to: Annotated[list[str], BeforeValidator(_listed), WithJsonSchema(ONE_OR_MORE)] = Field(
        default=[], description=f"any of {', '.join(REPORTERS)}"
    )
    project: str = Field(default="burnish", description="project under which the run appears")
    run_name: str | None = Field(default=None, description="name of the run; by default that of its directory")
    samples: list[str] = Field(
        default=[], description="prompts that the model answers while it learns, in samples.jsonl"
    )
    samples_every: Positive | Literal["epoch"] = Field(
        default="epoch", description="when it answers, besides before and after: each epoch, or every so many steps"
    )
    gradient_norms: bool = Field(default=False, description="log the gradient norm of each part of the model")
    memory: bool = Field(default=False, description="note what memory each step holds, in memory.jsonl")
    callbacks: Annotated[list[CallbackArguments], BeforeValidator(_callbacks)] = Field(
        default=[], description="callbacks of your own, each with path and args"
    )

    @field_validator("report_to")
    @classmethod
    def _known_reporters(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in REPORTERS:
                raise ValueError(f"must be among {', '.join(REPORTERS)}, not {name!r}")
        return names


class LaunchArguments(Group):
    """In how many processes a run is trained, and how long they wait for each other."""

    processes: Positive = Field(
        default=1, description="processes on this machine, each with a part of every batch; torchrun starts its own"
    )
    timeout: Annotated[float, Field(gt=0, le=10**6)] = Field(
        default=600, description="seconds that a process may keep the others waiting before training ends and names it"
    )


class TrainConfig(Group):
    """Everything a training run is made from; `training` holds fields of the stage's own config class."""

    model: ModelArguments
    data: DataArguments
    finetuning: FinetuningArguments = FinetuningArguments()
    generating: GeneratingArguments = GeneratingArguments()
    training: dict[str, Any]
    report: ReportArguments = ReportArguments()
    launch: LaunchArguments = LaunchArguments()

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
    "generating": GeneratingArguments,
    "report": ReportArguments,
    "launch": LaunchArguments,
}
FIELDS: dict[str, frozenset[str]] = {name: frozenset(group.model_fields) for name, group in GROUPS.items()}


@dataclass(frozen=True)
class Resolved:
    """A configuration, and where each value is from: `FILE:LINE`, `environment NAME`, `override`, `default (...)`."""

    config: TrainConfig
    origins: dict[str, str]

    def origin(self, dotted: str) -> str:
        """Where the value is from; that of another than these groups is `training`."""
        return self.origins.get(dotted, "training")


def load_config(path: Path, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Resolved:
    """Read a YAML or JSON file, put the environment and `group.key=value` overrides over it, and check every value.

    A short `key=value` is understood where exactly one group has that field. Variables of the environment (by default
    that of the process) are named like `BURNISH_TRAINING__OUTPUT_DIR`. The fields of `training` are checked against the
    stage's own config class when training starts. Raises CheckpointError naming file and line.
    """
    given = read_file(path, FIELDS)
    given |= read_environment(os.environ if environment is None else environment, FIELDS)
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
        raise all_of(explained(error, GROUPS, given, path)) from None
    every_field = [f"{group}.{key}" for group, model in GROUPS.items() for key in model.model_fields]
    resolved = Resolved(
        config, dict.fromkeys(every_field, "default (Burnish)") | {key: at.origin for key, at in given.items()}
    )
    if broken := broken_rules(resolved):
        raise all_of(broken)
    return resolved


def _is_known(dotted: str) -> bool:
    group, _, key = dotted.partition(".")
    return group == "training" or key in FIELDS.get(group, ())
