"""PiSSA adapter: rewritten as an ordinary LoRA adapter of twice the rank."""

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tools.checkpoint.adapters import INITIAL_ADAPTER, changes_base
from tools.checkpoint.change import Change, Computed, Source, Stored, TensorFile, json_file, refuse_ungathered, stored
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.checkpoint.report import Report
from tools.checkpoint.rewrite import rewrite
from tools.postprocess.options import DryRun, OutputDir, Overwrite

# Where trainers leave the initial adapter, seen from the adapter: beside it, or in the run directory above.
_INIT_FOLDERS = (INITIAL_ADAPTER, "initial_model")
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(embedding_)?(?P<factor>[AB])(\.weight)?")
# Part of an adapter beside the factors: absolute values, which hold on the original base as they are.
_CARRIED = re.compile(r".+\.lora_magnitude_vector(\.weight)?|(?!.*\.lora_).+")
_SIGN_BIT = {"F32": ("<u4", 1 << 31), "F16": ("<u2", 1 << 15), "BF16": ("<u2", 1 << 15), "F64": ("<u8", 1 << 63)}
# What the scale of a module depends on; trained and initial adapter must agree on it.
_SCALING_FIELDS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")


def convert_pissa(
    adapter: Annotated[Path, typer.Argument(help="The trained adapter.", show_default=False)],
    *,
    init: Annotated[
        Path | None,
        typer.Option(help="The adapter as it was before the first step; default: pissa_init beside it or in the run."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="The original base, for adapter_config.json; default: the one it names now."),
    ] = None,
    output: OutputDir = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
) -> Report:
    """Rewrite a PiSSA adapter as plain LoRA of twice the rank, so that it is right on the original base model.

    PiSSA, OLoRA, CorDA and LoRA-GA train on a changed base, W - s B0 A0. On W itself the same model is
    W + s (B A - B0 A0), which is LoRA with A' = [A; A0] and B' = [B, -B0]. Exact: only adapter files are read, tensors
    are concatenated as bytes. Magnitudes (DoRA), biases and modules_to_save are carried as they are.

    Example: tools convert-pissa runs/sft/checkpoint-500 --init runs/sft/pissa_init -o runs/sft/lora
    """

    def plan(trained: Checkpoint) -> Change:
        change = _plan(trained, init, base)
        if change.files and output is None and trained.is_training_state:
            problem = "still holds an optimizer, and a doubled rank would break resuming"
            raise CheckpointError(trained.path, problem, "choose an --output")
        return change

    options = {"init": os.path.relpath(init, adapter) if init else None, "base": base}
    return rewrite(
        "convert-pissa",
        adapter,
        plan,
        output=output,
        overwrite=overwrite,
        dry_run=dry_run,
        options={key: value for key, value in options.items() if value},
    )


def _plan(trained: Checkpoint, init: Path | None, base: str | None) -> Change:
    config = trained.adapter_config
    if config is None or trained.adapter is None:
        what = "a full model" if trained.config is not None or trained.model else "no adapter"
        raise CheckpointError(trained.path, f"{what}: adapter_config.json is not there", "name the adapter directory")
    refuse_ungathered(trained)
    folder = init or _find_init(trained.path)
    if folder is None or (init is None and not changes_base(config.get("init_lora_weights"))):
        return _without_init(trained, config)
    if folder.resolve() == trained.path.resolve():
        raise CheckpointError(folder, "is the trained adapter itself", "--init is the adapter before the first step")
    _refuse_odd_values(trained)
    initial = _open_initial(folder)
    pairs = _pairs(trained, initial)
    if _is_converted(trained, initial):
        return Change(f"already plain LoRA: holds the initial adapter of {folder}; nothing to do")
    _refuse_other_run(trained, initial)
    tensors: dict[str, Source] = {}
    for name, source in pairs.items():
        tensors[name] = _doubled(name, *source) if isinstance(source, tuple) else source
    file = trained.adapter.files[0]
    new_config = doubled_config(config) | {"base_model_name_or_path": _original_base(trained, initial, base)}
    residual = frozenset(name for name in trained.adapter.tensors if name not in pairs)
    return Change(
        f"rank {config['r']} -> {new_config['r']}: plain LoRA for {new_config['base_model_name_or_path']}",
        {file.name: TensorFile(tensors, file.metadata), "adapter_config.json": json_file(new_config)},
        {
            "base": new_config["base_model_name_or_path"],
            "rank": f"{config['r']} -> {new_config['r']}, for [A; A0] and [B, -B0]",
            "lora_alpha": f"{config['lora_alpha']} -> {new_config['lora_alpha']}, so that the scale stays",
            "modules": sum(isinstance(source, tuple) for source in pairs.values()) // 2,
        },
        residual,
    )


def _find_init(adapter: Path) -> Path | None:
    above = adapter.resolve()
    places = [above, *list(above.parents)[:2]]
    return next((place / name for place in places for name in _INIT_FOLDERS if (place / name).is_dir()), None)


def _without_init(trained: Checkpoint, config: Mapping[str, Any]) -> Change:
    kind = config.get("init_lora_weights")
    if changes_base(kind):
        problem = f"init_lora_weights is {kind}, and the adapter as it was before training is not here"
        raise CheckpointError(trained.path, problem, "name it with --init")
    return Change(f"plain LoRA (init_lora_weights is {str(kind).lower()}); nothing to do")


def _refuse_odd_values(trained: Checkpoint) -> None:
    config = trained.adapter_config or {}
    path = trained.path / "adapter_config.json"
    for field, kinds in (("r", int), ("lora_alpha", (int, float))):
        if isinstance(config.get(field), bool) or not isinstance(config.get(field), kinds):
            raise CheckpointError(path, f"{field} is {config.get(field)!r}, not a number")
    for field in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(field) or {}, dict):
            raise CheckpointError(path, f"{field} is {config[field]!r}, not a map from modules to numbers")
    if not isinstance(config.get("target_modules") or [], (list, str)):
        raise CheckpointError(path, f"target_modules is {config['target_modules']!r}, not a list of names")
    if not isinstance(config.get("base_model_name_or_path") or "", str):
        raise CheckpointError(path, f"base_model_name_or_path is {config['base_model_name_or_path']!r}, not a name")


def _open_initial(folder: Path) -> Checkpoint:
    initial = Checkpoint.open(folder)
    if initial.adapter_config is None or initial.adapter is None:
        raise CheckpointError(folder, "no adapter: adapter_config.json or adapter_model.safetensors is not there")
    refuse_ungathered(initial)
    return initial


def _pairs(trained: Checkpoint, initial: Checkpoint) -> dict[str, Stored | tuple[Stored, Stored]]:
    """By name: (trained, initial) for the factors of the adapter, the trained tensor alone for what is carried.

    The weight of a base layer beside its factors is the residual; it belongs to the changed base and stays behind.
    """
    assert trained.adapter is not None
    assert initial.adapter is not None
    _refuse_unconvertible(trained)
    now, then = stored(trained.adapter), stored(initial.adapter)
    factors = {name for name in now if _FACTOR.fullmatch(name)}
    for one, other, path in ((now, then, initial.path), (then, now, trained.path)):
        absent = next((name for name in one if _FACTOR.fullmatch(name) and name not in other), None)
        if absent:
            raise CheckpointError(path, f"has no {absent}", "trained and initial adapter must be of the same run")
    if not factors:
        raise CheckpointError(trained.path, "holds no lora_A and lora_B at all")
    return {
        name: (source, then[name]) if name in factors else source
        for name, source in now.items()
        if not name.endswith(".base_layer.weight")
    }


def _refuse_unconvertible(trained: Checkpoint) -> None:
    config, adapter = trained.adapter_config or {}, trained.adapter
    assert adapter is not None
    path = trained.path / "adapter_config.json"
    if config.get("peft_type") != "LORA":
        raise CheckpointError(path, f"peft_type is {config.get('peft_type')}; only LoRA can be converted")
    for name in ("target_parameters", "lora_bias"):
        if config.get(name):
            raise CheckpointError(path, f"{name} is set; adapters with it cannot be converted yet")
    for name, tensor in adapter.tensors.items():
        if not _FACTOR.fullmatch(name) and not _CARRIED.fullmatch(name):
            raise CheckpointError(trained.path / adapter.name, f"{name} is not a part of LoRA that is known here")
        if _FACTOR.fullmatch(name) and (len(tensor.shape) != 2 or tensor.dtype not in _SIGN_BIT):
            problem = f"{name} is {tensor.dtype} {list(tensor.shape)}; only floating-point matrices can be converted"
            raise CheckpointError(trained.path / adapter.name, problem)
    tied = "lm_head" in str(sorted(map(str, config.get("target_modules") or ()))) and _base_is_tied(config)
    if tied:
        problem = "targets lm_head, which is tied to the embedding: the initial adapter was subtracted from both"
        raise CheckpointError(path, problem, "no adapter on the original base equals it; merge on the residual base")


def _base_is_tied(config: Mapping[str, Any]) -> bool:
    base = Path(config.get("base_model_name_or_path") or "")
    return (base / "config.json").is_file() and bool((Checkpoint.open(base).config or {}).get("tie_word_embeddings"))


def _rank(name: str, source: Stored) -> int:
    match = _FACTOR.fullmatch(name)
    assert match
    return source.tensor.shape[0 if match["factor"] == "A" else 1]


def _refuse_other_run(trained: Checkpoint, initial: Checkpoint) -> None:
    """Raise CheckpointError when ranks, shapes or scales say that the two are not of one run."""
    config, then_config = trained.adapter_config or {}, initial.adapter_config or {}
    assert trained.adapter is not None
    assert initial.adapter is not None
    now, then = stored(trained.adapter), stored(initial.adapter)
    for name in filter(_FACTOR.fullmatch, now):
        rank, expected = _rank(name, now[name]), rank_of(config, name)
        if rank != expected:
            problem = f"{name} has rank {rank}, adapter_config.json says {expected}"
            raise CheckpointError(trained.path, problem, "one of the two is not of this adapter")
        if rank != _rank(name, then[name]):
            raise CheckpointError(
                initial.path,
                f"rank {_rank(name, then[name])} at {name}, but {trained.path} has rank {rank}",
                "is it the initial adapter of this run?",
            )
        if (now[name].shape, now[name].dtype) != (then[name].shape, then[name].dtype):
            one, other = (f"{each[name].dtype} {list(each[name].shape)}" for each in (then, now))
            raise CheckpointError(initial.path, f"{name} is {one}, in {trained.path} {other}")
    for field in _SCALING_FIELDS:
        if (config.get(field) or 0) != (then_config.get(field) or 0):
            problem = f"{field} is {then_config.get(field)}, in {trained.path} {config.get(field)}"
            raise CheckpointError(initial.path, problem, "is it the initial adapter of this run?")


def rank_of(config: Mapping[str, Any], name: str) -> int:
    """The rank that adapter_config.json gives the module of a tensor; the first matching pattern wins, as in PEFT.

    Raises CheckpointError for a pattern that is no regular expression, and a rank that is no number.
    """
    match = _FACTOR.fullmatch(name)
    assert match
    module = match["module"].removeprefix("base_model.model.")
    patterns: Mapping[str, int] = config.get("rank_pattern") or {}
    try:
        found = (rank for key, rank in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
        return int(next(found, config["r"]))
    except (re.error, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError("adapter_config.json", f"r or rank_pattern cannot be read ({error})") from error


def _is_converted(trained: Checkpoint, initial: Checkpoint) -> bool:
    """Whether the last r rows of every A are A0 and the last r columns of every B are -B0; the config cannot tell."""
    assert trained.adapter is not None
    assert initial.adapter is not None
    now, then = stored(trained.adapter), stored(initial.adapter)
    for name in filter(_FACTOR.fullmatch, now):
        rank = _rank(name, then[name])
        if _rank(name, now[name]) != 2 * rank or now[name].dtype != then[name].dtype:
            return False
        new, old = _bits(now[name]), _bits(then[name])
        match = _FACTOR.fullmatch(name)
        assert match
        tail = new[rank:] if match["factor"] == "A" else _negated(new[:, rank:], now[name].dtype)
        if tail.shape != old.shape or (tail != old).any():
            return False
    return True


def _bits(source: Stored) -> Any:
    import numpy as np

    return np.frombuffer(source.read(), dtype=_SIGN_BIT[source.dtype][0]).reshape(source.shape)


def _negated(bits: Any, dtype: str) -> Any:
    return bits ^ bits.dtype.type(_SIGN_BIT[dtype][1])


def _doubled(name: str, now: Stored, then: Stored) -> Computed:
    """A' = [A; A0]: (r, in) -> (2r, in), or B' = [B, -B0]: (out, r) -> (out, 2r), so B' A' = B A - B0 A0."""
    match = _FACTOR.fullmatch(name)
    assert match
    rows, columns = now.shape
    is_a = match["factor"] == "A"

    def data() -> Iterator[bytes]:
        import numpy as np

        parts = (_bits(now), _bits(then) if is_a else _negated(_bits(then), then.dtype))
        yield np.concatenate(parts, axis=0 if is_a else 1).tobytes()

    shape = (2 * rows, columns) if is_a else (rows, 2 * columns)
    return Computed(now.dtype, shape, 2 * now.nbytes, data, (now,))


def doubled_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The LoraConfig of [A; A0], [B, -B0]: ranks doubled, alphas such that every module keeps its scale.

    The scale is alpha / r, with rslora alpha / sqrt(r) (Kalajdzievski 2023, arXiv:2312.03732), so alpha grows by 2 or
    by sqrt(2).
    """
    factor = math.sqrt(2) if config.get("use_rslora") else 2
    return {
        **config,
        "r": 2 * config["r"],
        "lora_alpha": factor * config["lora_alpha"],
        "rank_pattern": {key: 2 * rank for key, rank in (config.get("rank_pattern") or {}).items()},
        "alpha_pattern": {key: factor * alpha for key, alpha in (config.get("alpha_pattern") or {}).items()},
        "init_lora_weights": True,
    }


def _original_base(trained: Checkpoint, initial: Checkpoint, base: str | None) -> str:
    """The base the result belongs on: never the residual one, which a script that prepares PiSSA leaves around init."""
    if base:
        return base
    config, then_config = trained.adapter_config or {}, initial.adapter_config or {}
    named = config.get("base_model_name_or_path") or then_config.get("base_model_name_or_path")
    if not named:
        raise CheckpointError(trained.path, "does not name its base model", "name the original one with --base")
    if Path(named).resolve() == initial.path.resolve().parent and Path(named).is_dir():
        problem = f"names {named} as its base, which holds the initial adapter and so is the residual base"
        raise CheckpointError(trained.path, problem, "name the original base with --base")
    return str(named)
