"""What each value may be only together with others: one rule a function, said in the user's words."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tools.checkpoint.errors import CheckpointError
from tools.lora.adapters import changes_base
from tools.training.ranks import world_size

if TYPE_CHECKING:
    from tools.training.config import Resolved

Problem = tuple[str, str, str]  # key, what is wrong with it, what to do
Training = Mapping[str, Any]  # the fields of `training` that were given, each of the type its class declares

# Fields of `training` and the numbers they may be: the least, whether it is itself allowed, the greatest.
LIMITS: dict[str, tuple[float, bool, float]] = {
    **dict.fromkeys(("learning_rate", "weight_decay", "max_grad_norm"), (0, True, math.inf)),
    **dict.fromkeys(("warmup_steps", "eval_delay", "neftune_noise_alpha"), (0, True, math.inf)),
    **dict.fromkeys(("dataloader_num_workers", "num_train_epochs", "adam_epsilon"), (0, True, math.inf)),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), (1, True, 2**31)),
    **dict.fromkeys(("gradient_accumulation_steps", "eval_accumulation_steps"), (1, True, 2**31)),
    **dict.fromkeys(("save_steps", "eval_steps", "logging_steps"), (0, False, 2**53)),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), (0, True, 1 - 1e-9)),
    "label_smoothing_factor": (0, True, 1),
    **dict.fromkeys(("seed", "data_seed"), (0, True, 2**32 - 1)),
    "save_total_limit": (1, True, math.inf),
}


def broken_rules(resolved: "Resolved") -> list[CheckpointError]:
    """The rules among the groups of Burnish that a configuration breaks."""
    return _placed(resolved, (problem for rule in _RULES for problem in rule(resolved)))


def broken_training_rules(resolved: "Resolved", training: Training) -> list[CheckpointError]:
    """The rules of `training`, alone and with the other groups, that a configuration breaks."""
    problems = [problem for key, value in training.items() for problem in _out_of_range(key, value)]
    if problems:
        return _placed(resolved, problems)
    return _placed(resolved, (problem for rule in _TRAINING_RULES for problem in rule(resolved, training)))


def _placed(resolved: "Resolved", problems: Iterator[Problem] | list[Problem]) -> list[CheckpointError]:
    return [CheckpointError(resolved.origin(key), f"{key} {problem}", remedy) for key, problem, remedy in problems]


def _out_of_range(key: str, value: Any) -> Iterator[Problem]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    dotted = f"training.{key}"
    least, is_allowed, greatest = LIMITS.get(key, (-math.inf, True, math.inf))
    if not isinstance(value, int) and not math.isfinite(value):
        yield dotted, f"must be a finite number, not {value}", ""
    elif key == "max_steps":
        if value < 1 and value != -1:
            yield dotted, f"must be at least 1, not {value}", "leave it out to go by num_train_epochs"
    elif value < least or (value == least and not is_allowed):
        yield dotted, f"must be {'at least' if is_allowed else 'greater than'} {least}, not {value}", ""
    elif value > greatest:
        yield dotted, f"must be at most {greatest:g}, not {value}", ""


def _sampling(resolved: "Resolved") -> Iterator[Problem]:
    generating = resolved.config.generating
    for key in ("temperature", "top_p", "top_k"):
        is_given = getattr(generating, key) != type(generating).model_fields[key].default
        if is_given and not generating.do_sample:
            yield f"generating.{key}", "is read only when tokens are drawn", "add generating.do_sample: true"


def _quantized(resolved: "Resolved") -> Iterator[Problem]:
    model, finetuning = resolved.config.model, resolved.config.finetuning
    init = finetuning.init_lora_weights
    if finetuning.method == "full":
        if model.quantization:
            yield (
                "model.quantization",
                f"{model.quantization} is for a base that is not trained",
                "write finetuning.method: lora",
            )
        return
    if model.quantization and changes_base(init):
        problem = f"{init} takes a part out of the base weights, and {model.quantization} weights cannot be changed so"
        yield "finetuning.init_lora_weights", problem, "use true or loftq, or leave model.quantization out"
    if init == "loftq" and model.quantization != "4bit":
        problem = "loftq makes up for what 4-bit weights lose, and this base is not held in 4 bits"
        yield "finetuning.init_lora_weights", problem, "add model.quantization: 4bit"


def _adapter(resolved: "Resolved") -> Iterator[Problem]:
    from tools.training.config import FROM_DATA

    finetuning = resolved.config.finetuning
    if finetuning.method == "full":
        return
    init, key = finetuning.init_lora_weights, "finetuning.init_lora_weights"
    ranks = {finetuning.r, *finetuning.rank_pattern.values()}
    if init == "orthogonal" and (odd := [rank for rank in ranks if rank % 2]):
        yield key, f"orthogonal needs even ranks, and r is {odd[0]}", "add one to it"
    if finetuning.target_parameters and init not in (True, False, "gaussian"):
        problem = f"{init} starts linear layers, and finetuning.target_parameters are none"
        yield key, problem, "use true or gaussian"
    if finetuning.target_parameters and finetuning.lora_dropout:
        problem = "cannot be applied to finetuning.target_parameters"
        yield "finetuning.lora_dropout", problem, "set it to 0"
    if finetuning.use_dora and finetuning.target_parameters:
        yield "finetuning.use_dora", "is for layers, and finetuning.target_parameters are none", "leave one of them out"
    if init in FROM_DATA and resolved.config.data.packing:
        problem = f"{init} looks at single rows, and those of data.packing are several in one"
        yield key, problem, "leave one of them out"
    if init == "eva" and finetuning.rank_pattern:
        yield key, "eva finds the rank of each layer itself", "leave finetuning.rank_pattern out"
    if init == "mica" and finetuning.use_dora:
        yield key, "mica and finetuning.use_dora are both a way to train half of the adapter", "leave one of them out"


def _early_stopping(resolved: "Resolved") -> Iterator[Problem]:
    if resolved.config.finetuning.early_stopping_patience is None:
        return
    key = "finetuning.early_stopping_patience"
    if resolved.config.data.eval_file is None:
        yield key, "waits for evaluations, but there are no rows to evaluate on", "add data.eval_file"
    for name, unfit in (("load_best_model_at_end", False), ("eval_strategy", "no"), ("save_strategy", "no")):
        if name in resolved.config.training and resolved.config.training[name] in (unfit, False):
            yield f"training.{name}", f"does not go with {key}, which ends with the best model", "leave it out"


def _samples(resolved: "Resolved") -> Iterator[Problem]:
    if resolved.config.report.samples and resolved.config.finetuning.stage == "reward":
        yield "report.samples", "are texts, and a reward model writes none", "leave them out"


def _head(resolved: "Resolved") -> Iterator[Problem]:
    if resolved.config.model.value_head is not None and resolved.config.finetuning.stage == "sft":
        yield "model.value_head", "is of a reward model, and finetuning.stage is sft", "leave it out"


def _processes(resolved: "Resolved") -> Iterator[Problem]:
    asked, started = resolved.config.launch.processes, world_size()
    if started > 1 and asked != started and not resolved.origin("launch.processes").startswith("default"):
        yield "launch.processes", f"is {asked}, but a launcher has started {started} processes", "leave it out"


def _sharded(resolved: "Resolved", training: Training) -> Iterator[Problem]:
    if max(resolved.config.launch.processes, world_size()) == 1:
        return
    for key in ("fsdp", "deepspeed"):
        if training.get(key):
            problem = "shards the model, and in several processes each must hold all of it"
            yield f"training.{key}", problem, "leave it out, or train in one process"


def _precision(resolved: "Resolved", training: Training) -> Iterator[Problem]:
    dtype, full = resolved.config.model.dtype, resolved.config.finetuning.method == "full"
    bf16, fp16 = training.get("bf16"), training.get("fp16")
    if bf16 and fp16:
        yield "training.fp16", "and training.bf16 exclude each other", "keep bf16 where the GPU supports it"
    elif bf16 and dtype == "float16":
        yield (
            "training.bf16",
            "is not the precision of a float16 model",
            "write training.fp16, or model.dtype: bfloat16",
        )
    elif fp16 and dtype == "bfloat16":
        yield (
            "training.fp16",
            "is not the precision of a bfloat16 model",
            "write training.bf16, or model.dtype: float32",
        )
    if full and dtype == "float16":
        yield (
            "model.dtype",
            "float16 weights cannot be trained in full: their gradients cannot be scaled",
            "use float32 with training.fp16: true",
        )


def _evaluation(resolved: "Resolved", training: Training) -> Iterator[Problem]:
    if resolved.config.data.eval_file is not None:
        return
    needs_rows = "there are no rows to evaluate on"
    if _strategy(training, "eval") not in (None, "no"):
        yield "training.eval_strategy", f"is {_strategy(training, 'eval')}, but {needs_rows}", "add data.eval_file"
    elif training.get("load_best_model_at_end"):
        yield "training.load_best_model_at_end", f"compares evaluations, but {needs_rows}", "add data.eval_file"
    elif _strategy(training, "save") == "best":
        yield "training.save_strategy", f"is best, but {needs_rows}", "add data.eval_file"


def _in_step(resolved: "Resolved", training: Training) -> Iterator[Problem]:
    """The best model can be loaded only if each evaluation has a checkpoint; what is not given, `in_step` makes so."""
    if not training.get("load_best_model_at_end"):
        return
    save, evaluate = _strategy(training, "save"), _strategy(training, "eval")
    why = "training.load_best_model_at_end needs a checkpoint for every evaluation"
    if evaluate == "no" or save == "no":
        key = "eval" if evaluate == "no" else "save"
        yield f"training.{key}_strategy", f"is no, and {why}", "write steps or epoch"
    elif save and evaluate and save not in (evaluate, "best"):
        yield "training.save_strategy", f"is {save} and training.eval_strategy {evaluate}; {why}", "make them the same"
    steps, every = training.get("save_steps"), training.get("eval_steps")
    if steps and every and {save, evaluate} <= {None, "steps"} and not _is_whole(steps / every):
        problem = f"is {steps:g} and training.eval_steps {every:g}; the best model can be loaded only if it was saved"
        yield "training.save_steps", problem, f"write a multiple of {every:g}"


def _is_whole(quotient: float) -> bool:
    """Whether it is a whole number but for what floats lose: 0.3 / 0.1 is."""
    return math.isclose(quotient, max(1, round(quotient)), rel_tol=1e-9)


def _length(resolved: "Resolved", training: Training) -> Iterator[Problem]:
    if training.get("num_train_epochs") == 0 and training.get("max_steps", -1) < 1:
        yield "training.num_train_epochs", "is 0: nothing would be trained", "write 1, or set training.max_steps"


def _resumable(resolved: "Resolved", training: Training) -> Iterator[Problem]:
    if training.get("save_only_model"):
        problem = "leaves out what a run that was stopped or killed goes on with"
        yield "training.save_only_model", problem, "set it to false; training.save_total_limit saves room"


def in_step(training: Training, has_eval_rows: bool) -> dict[str, Any]:
    """When to evaluate and when to save, where only one of both was given: the same for both.

    Rows to evaluate on that nobody says when to use are used whenever a checkpoint is saved; where only the best is
    saved, at each epoch. Steps to evaluate at are always among it, or transformers would take `logging_steps`.
    """
    from transformers import TrainingArguments

    if not has_eval_rows:
        return {}
    added: dict[str, Any] = {}
    save, evaluate = _strategy(training, "save"), _strategy(training, "eval")
    steps, every = training.get("save_steps"), training.get("eval_steps")
    needs_save = training.get("load_best_model_at_end")
    if evaluate is None:
        at_best = "steps" if every else "epoch"
        evaluate = added["eval_strategy"] = at_best if save == "best" else save or "steps"
    if save is None and needs_save:
        save = added["save_strategy"] = evaluate
    if evaluate == "steps" and not every:
        added["eval_steps"] = steps or TrainingArguments.save_steps
    if save == evaluate == "steps" and needs_save and not steps:
        added["save_steps"] = every or TrainingArguments.save_steps
    return added


def _strategy(training: Training, which: str) -> str | None:
    """The given value of `save_strategy` or `eval_strategy`, as text."""
    value = training.get(f"{which}_strategy")
    return None if value is None else str(getattr(value, "value", value))


_RULES: tuple[Callable[["Resolved"], Iterator[Problem]], ...] = (
    *(_sampling, _quantized, _adapter, _early_stopping, _samples, _head, _processes),
)
_TRAINING_RULES: tuple[Callable[["Resolved", Training], Iterator[Problem]], ...] = (
    *(_sharded, _precision, _evaluation, _in_step, _length, _resumable),
)
