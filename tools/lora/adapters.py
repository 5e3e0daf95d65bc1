"""LoRA adapters: the modules that one adapts, with ranks and scales, and which initialisations change the base."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tools.checkpoint.change import Stored, stored
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Weights

# They subtract the initial adapter from the base (PEFT 0.21, tuners/lora/layer.py).
_CHANGES_BASE = re.compile(r"pissa(_niter_\d+)?|olora|corda|lora_ga")
# Where a trainer keeps the initial adapter, in the run or beside the trained one.
INITIAL_ADAPTER = "pissa_init"

PREFIX = "base_model.model."
_PARTS = {
    **{"A.weight": "A", "B.weight": "B", "embedding_A": "A", "embedding_B": "B", "B.bias": "bias"},
    **{"magnitude_vector": "magnitude", "magnitude_vector.weight": "magnitude"},
}
# Fields of a LoraConfig (PEFT 0.21) that leave `scaling * B A` what it is; any other that is set changes the model.
_PLAIN_FIELDS = frozenset(
    (
        *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "lora_dropout", "bias"),
        *("target_modules", "exclude_modules", "target_parameters", "layers_to_transform", "layers_pattern"),
        *("modules_to_save", "trainable_token_indices", "ensure_weight_tying", "fan_in_fan_out", "use_dora"),
        *("lora_bias", "init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("megatron_config", "megatron_core", "runtime_config", "qalora_group_size"),
    )
)
# What decoders call the embedding of tokens, and the matrix that turns hidden states into logits. PEFT saves them
# unasked when they are targets or the vocabulary has grown.
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "shared", "tok_embeddings")
OUTPUT_MATRICES = ("lm_head", "embed_out")


def changes_base(init_lora_weights: Any) -> bool:
    """Whether an adapter with this `init_lora_weights` belongs to a base that its initialisation changed."""
    return isinstance(init_lora_weights, str) and bool(_CHANGES_BASE.fullmatch(init_lora_weights))


@dataclass(frozen=True)
class LoraModule:
    """One adapted module or parameter: it adds `scaling * B A` to the weight of `name` in the base.

    `kind`, and the shapes it goes with:
    - linear: A [r, in], B [out, r]; embedding: A [r, vocabulary], B [width, r], and the weight is changed by (B A)^T;
    - conv: A [r, in, ...], B [out, r / groups, 1, ...];
    - parameter (`target_parameters`): A [experts * r, in], expert after expert, and B [out, r * experts], the experts
      of each rank side by side. Several of one module have `.base_layer` behind its name, the innermost the most.

    `bias` is that of B (`lora_bias`), added to the output with the same scaling; `magnitude` is DoRA's.
    """

    name: str
    A: Stored
    B: Stored
    r: int
    alpha: float
    scaling: float
    kind: str
    magnitude: Stored | None = None
    bias: Stored | None = None

    @property
    def blocks(self) -> int:
        """How many independent products it is: experts of a parameter, groups of a convolution, else 1."""
        if self.kind == "parameter":
            return self.A.shape[0] // self.r
        return self.r // self.B.shape[1] if self.kind == "conv" else 1

    @property
    def sources(self) -> tuple[Stored, ...]:
        """Every stored tensor of it."""
        return tuple(part for part in (self.A, self.B, self.magnitude, self.bias) if part is not None)


def lora_modules(config: Mapping[str, Any], weights: Weights) -> dict[str, LoraModule]:
    """By name, without `base_model.model.`, every module that these adapter weights adapt.

    Raises CheckpointError for another method than LoRA, for a setting or tensor that is not known here, and for
    tensors that do not have the rank that the configuration gives them.
    """
    path = weights.files[0].path
    settings = path.with_name("adapter_config.json")
    if config.get("peft_type") != "LORA":
        raise CheckpointError(settings, f"peft_type is {config.get('peft_type')}; only LoRA is known here")
    if odd := unknown_fields(config):
        raise CheckpointError(settings, f"{odd[0]} is set; what adapters with it compute is not known here")
    refuse_odd_values(settings, config)
    parts: dict[str, dict[str, Stored]] = {}
    for name, source in stored(weights).items():
        module, mark, part = name.rpartition(".lora_")
        if mark and part not in _PARTS:
            raise CheckpointError(path, f"{name} is not a part of LoRA that is known here")
        if mark:
            parts.setdefault(module.removeprefix(PREFIX), {})[_PARTS[part]] = source
    for module, found in parts.items():
        if absent := next((part for part in "AB" if part not in found), None):
            raise CheckpointError(path, f"{module} has no lora_{absent}", "the save was cut short")
    return {name: _module(config, name, found) for name, found in parts.items()}


def beside_factors(config: Mapping[str, Any], weights: Weights) -> dict[str, Stored]:
    """By name on disk, what an adapter holds beside its LoRA modules: tensors that take the place of the base's.

    They are `modules_to_save`, biases, rows of trainable tokens, embeddings of a grown vocabulary, and `base_layer`
    weights, which PEFT saves with an adapted embedding. Raises CheckpointError for any other, by name.
    """
    beside = {name: source for name, source in stored(weights).items() if ".lora_" not in name}
    saved = (*EMBEDDINGS, *OUTPUT_MATRICES, *(config.get("modules_to_save") or ()))
    for name in beside:
        owner, _, parameter = name.removeprefix(PREFIX).rpartition(".")
        known = (
            parameter == "trainable_tokens_delta"
            or (parameter == "bias" and config.get("bias", "none") != "none")
            or owner.endswith(".base_layer")
            or any(owner.endswith(module) or f"{module}." in owner for module in saved)
        )
        if not known:
            raise CheckpointError(
                weights.files[0].path, f"{name} is not a part of LoRA that is known here", "is it in modules_to_save?"
            )
    return beside


def _module(config: Mapping[str, Any], name: str, parts: Mapping[str, Stored]) -> LoraModule:
    a, b = parts["A"], parts["B"]
    keys = _targeted_parameters(config, name)
    settings = {(_pattern(config, "rank", key), _pattern(config, "alpha", key)) for key in keys or [name]}
    path = a.file.path
    if len(settings) > 1:
        problem = f"{name} is adapted in {', '.join(keys)} with other ranks or alphas, and its tensors do not say which"
        raise CheckpointError(path.with_name("adapter_config.json"), problem)
    [(r, alpha)] = settings
    if r < 1:
        raise CheckpointError(path.with_name("adapter_config.json"), f"{name} has rank {r} by r and rank_pattern")
    kind = "parameter" if keys else "conv" if len(a.shape) > 2 else "linear"
    kind = "embedding" if a.name.endswith("embedding_A") else kind
    scaling = alpha / (math.sqrt(r) if config.get("use_rslora") else r)
    magnitude, bias = parts.get("magnitude"), parts.get("bias")
    module = LoraModule(name, a, b, int(r), alpha, scaling, kind, magnitude, bias)
    _check_shapes(module)
    return module


def _check_shapes(module: LoraModule) -> None:
    a, b = module.A, module.B
    for factor in (a, b):
        if len(factor.shape) < 2 or 0 in factor.shape:
            problem = f"{factor.name} is {factor.dtype} {list(factor.shape)}, not a matrix"
            raise CheckpointError(factor.file.path, problem, "an un-gathered ZeRO-3 parameter? save it again")
    if module.kind == "parameter":
        if a.shape[0] % module.r or b.shape[1] != a.shape[0]:
            _raise_rank(a, f"{a.shape[0]} rows, no multiple", module.r)
    elif a.shape[0] != module.r:
        _raise_rank(a, f"rank {a.shape[0]}", module.r)
    elif b.shape[1] != module.r and (module.kind != "conv" or module.r % b.shape[1]):
        _raise_rank(b, f"rank {b.shape[1]}", module.r)


def _raise_rank(factor: Stored, found: str, expected: int) -> None:
    problem = f"{factor.name} has {found}, adapter_config.json says {expected}"
    raise CheckpointError(factor.file.path.parent, problem, "one of the two is not of this adapter")


def _targeted_parameters(config: Mapping[str, Any], name: str) -> list[str]:
    """The parameters of this module that `target_parameters` means, as PEFT writes their names in full."""
    owner = name
    while owner.endswith(".base_layer"):
        owner = owner.removesuffix(".base_layer")
    targets = (target.rpartition(".") for target in sorted(config.get("target_parameters") or ()))
    return [f"{owner}.{parameter}" for module, _, parameter in targets if f".{owner}".endswith(f".{module}")]


def _pattern(config: Mapping[str, Any], field: str, name: str) -> Any:
    """The rank or alpha of a module; the first matching pattern wins (PEFT 0.21, `get_pattern_key`)."""
    patterns: Iterable[tuple[str, Any]] = (config.get(f"{field}_pattern") or {}).items()
    default = config["r" if field == "rank" else "lora_alpha"]
    try:
        return next((value for key, value in patterns if re.match(rf"(.*\.)?({key})$", name)), default)
    except re.error as error:
        raise CheckpointError("adapter_config.json", f"{field}_pattern cannot be read ({error})") from error


def unknown_fields(config: Mapping[str, Any]) -> list[str]:
    """Fields of an adapter_config.json that are set and change what the adapter computes in a way not known here."""
    return [field for field in config if field not in _PLAIN_FIELDS and config[field]]


def refuse_odd_values(path: Any, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a field of an adapter_config.json that is not of the type that PEFT gives it."""
    for field, kinds in (("r", int), ("lora_alpha", (int, float))):
        if isinstance(config.get(field), bool) or not isinstance(config.get(field), kinds):
            raise CheckpointError(path, f"{field} is {config.get(field)!r}, not a number")
    for field, kinds in (("rank_pattern", int), ("alpha_pattern", (int, float))):
        patterns = config.get(field) or {}
        if not isinstance(patterns, dict):
            raise CheckpointError(path, f"{field} is {patterns!r}, not a map from modules to numbers")
        if odd := next((k for k, v in patterns.items() if isinstance(v, bool) or not isinstance(v, kinds)), None):
            raise CheckpointError(path, f"{field} gives {odd} {patterns[odd]!r}, not a number")
    if not isinstance(config.get("target_modules") or [], (list, str)):
        raise CheckpointError(path, f"target_modules is {config['target_modules']!r}, not a list of names")
    for field in ("modules_to_save", "target_parameters"):
        names = config.get(field) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(path, f"{field} is {names!r}, not a list of names")
    if not isinstance(config.get("base_model_name_or_path") or "", str):
        raise CheckpointError(path, f"base_model_name_or_path is {config['base_model_name_or_path']!r}, not a name")
