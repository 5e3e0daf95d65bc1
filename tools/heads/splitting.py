"""The plans of a split: policy and value model of a PPO trainer, each as a model of its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.checkpoint.change import Change, Content, json_file, refuse_ungathered
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint, Weights
from tools.checkpoint.shards import rewritten
from tools.heads.actor_critic import (
    CRITIC_BACKBONE,
    POLICY,
    VALUE_MODEL,
    Tensors,
    critic_tensors,
    find_parts,
    policy_tensors,
)
from tools.heads.classifiers import FAMILIES, Family, classifier_config, family_of
from tools.heads.padding import pad_token_id


def split_plans(source: Checkpoint, critic_config: Path | None) -> dict[str, Change]:
    """What becomes of each model that is there: `policy`, `critic`.

    `critic_config` is the model whose config.json describes the critic. Raises CheckpointError, before a byte is
    written, for what is no actor-critic checkpoint.
    """
    model, config = source.model, source.config
    if model is None:
        raise CheckpointError(source.path, "holds no model weights", "name a directory with model.safetensors")
    refuse_ungathered(source)
    path = source.path / model.name
    parts = find_parts(path, model)
    if others := [weights.name for weights in (source.adapter, source.head) if weights]:
        problem = f"{' and '.join(others)} beside the weights of policy and value model"
        raise CheckpointError(source.path, problem, "move it away: it is not known which of the two it belongs to")
    if config is None:
        raise CheckpointError(source.path, "has no config.json", "copy that of the policy into it")
    plans = {}
    if POLICY in parts:
        family = FAMILIES.get(str(config.get("model_type")))
        is_tied = family.is_tied(config) if family else bool(config.get("tie_word_embeddings"))
        plans["policy"] = _plan(model, policy_tensors(path, parts, is_tied), {}, "policy: a causal LM")
    if VALUE_MODEL in parts or CRITIC_BACKBONE in parts:
        plans["critic"] = _critic(source, model, parts, critic_config)
    return plans


def _plan(model: Weights, tensors: Tensors, files: Mapping[str, Content | None], summary: str) -> Change:
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    dropped = frozenset(model.tensors) - {tensor.name for tensor in tensors.values()}
    details = {"tensors": len(tensors), "bytes": nbytes}
    return Change(summary, {**files, **rewritten(model, tensors)}, details, dropped)


def _critic(source: Checkpoint, model: Weights, parts: Mapping[str, Tensors], critic_config: Path | None) -> Change:
    path = source.path / model.name
    described = Checkpoint.open(critic_config) if critic_config else source
    family = family_of(described.path, described.config)
    assert described.config is not None
    tensors = critic_tensors(path, parts, family)
    architecture = _architecture(path, tensors, family)
    if critic_config is None:
        _refuse_other_decoder(path, parts.get(POLICY, {}), tensors, family)
    config = classifier_config(described.config, architecture, pad_token_id(source)) | {"tie_word_embeddings": False}
    carried = {"config.json", *source.processor_files, *(file.name for file in model.files), model.index_name}
    files: dict[str, Content | None] = {
        entry.name: None for entry in sorted(source.path.iterdir()) if entry.name not in {*carried, ".burnish"}
    }
    return _plan(model, tensors, files | {"config.json": json_file(config)}, f"critic: {architecture} with one label")


def _architecture(path: Path, tensors: Tensors, family: Family) -> str:
    """The class of the value model, by the tensors that it has beside its decoder."""
    head = {name: source for name, source in tensors.items() if not name.startswith(f"{family.base}.")}
    shown = ", ".join(f"{VALUE_MODEL}.{name} {list(source.shape)}" for name, source in head.items()) or "no head"
    architecture = family.classifier_of(head.keys())
    if architecture is None:
        known = " or ".join(name for name in (family.sequence, family.token_class) if name)
        raise CheckpointError(path, f"the value model has {shown}, which is not the head of {known}", _HOW)
    widths = {source.shape[-1] for name, source in tensors.items() if name not in head and source.shape}
    one_output = [
        s.shape == (1,) if name.endswith(".bias") else s.shape in {(1, w) for w in widths} for name, s in head.items()
    ]
    if not all(one_output):
        raise CheckpointError(path, f"the value model has {shown}; a critic has one output, as wide as its decoder")
    return architecture


_HOW = "if it is built otherwise, name its configuration with --critic-config"


def _refuse_other_decoder(path: Path, policy: Tensors, critic: Tensors, family: Family) -> None:
    """Raise CheckpointError when the policy's config.json cannot be that of the critic."""
    ours, theirs = (_shapes(tensors, family) for tensors in (critic, policy))
    if odd := policy and sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
        has = [f"{part} has {_shape(shapes, odd[0])}" for part, shapes in ((VALUE_MODEL, ours), (POLICY, theirs))]
        problem = f"{odd[0]}: {' and '.join(has)}, so config.json does not describe the critic"
        raise CheckpointError(path, problem, "name the critic's configuration with --critic-config")


def _shapes(tensors: Tensors, family: Family) -> dict[str, tuple[int, ...]]:
    return {name: source.shape for name, source in tensors.items() if name.startswith(f"{family.base}.")}


def _shape(shapes: Mapping[str, Any], name: str) -> str:
    return str(list(shapes[name])) if name in shapes else "none"
