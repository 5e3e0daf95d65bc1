"""The value head of a checkpoint: found in its files, and read as the tensors of the layers that score."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tools.checkpoint.change import Source, refuse_ungathered, stored
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint, Weights
from tools.heads.classifiers import SCORE_BIAS
from tools.heads.files import refuse_contradictions, refuse_other_values
from tools.heads.finding import Head, architectures_of, choose_head, find_heads, some
from tools.heads.layouts import layouts_for
from tools.heads.wrappers import bare_names

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StoredHead:
    """A value head, and the weights that hold it."""

    checkpoint: Checkpoint
    weights: Weights
    head: Head

    @property
    def names(self) -> frozenset[str]:
        """Its tensors and those its framework saves beside it, by their names without wrappers."""
        return frozenset([*self.head.names.values(), *self.head.companions.values()])

    @property
    def is_mlp(self) -> bool:
        return self.head.layout.form == "mlp"

    def __str__(self) -> str:
        frameworks, names = self.head.layout.frameworks, some(self.head.names.values())
        return f"{names} in {self.weights.name} ({frameworks})"

    def tensors(self) -> "dict[str, torch.Tensor]":
        """Float32, by what follows the prefix of the layout: `weight` [1, hidden] and `bias` [1] of a linear head, zero
        where the layout has none; `0.weight`, `0.bias`, `2.weight`, `2.bias` of an MLP."""
        import torch

        prefix = f"{self.head.layout.prefix}."
        found = read(self.weights, self.head.names)
        tensors = {self.head.names[name].removeprefix(prefix): tensor.float() for name, tensor in found.items()}
        if not self.is_mlp and "bias" not in tensors:
            tensors["bias"] = torch.tensor([float((self.checkpoint.config or {}).get(SCORE_BIAS, 0.0))])
        return tensors

    @property
    def normalisation(self) -> tuple[float, float]:
        """Mean and deviation that a reward model of OpenRLHF takes from its scores outside of training."""
        config = self.checkpoint.config or {}
        is_normalised = config.get("normalize_reward") and "RewardModel" in architectures_of(config)
        return (float(config["mean"]), float(config["std"])) if is_normalised and self.head.declared else (0.0, 1.0)


def stored_heads(checkpoint: Checkpoint) -> tuple[StoredHead, ...]:
    """Every head in the files of a checkpoint; one that lies in the head file and in the weights counts once.

    Raises CheckpointError where they contradict each other, and for tensors without elements.
    """
    refuse_ungathered(checkpoint)
    refuse_contradictions(checkpoint)
    found = []
    beside: dict[str, Mapping[str, Source]] = {}
    for weights in (checkpoint.head, checkpoint.model, checkpoint.adapter):
        for head in find_heads(weights.tensors, checkpoint.config) if weights else ():
            assert weights
            tensors: dict[str, Source] = {bare: stored(weights)[name] for name, bare in head.names.items()}
            if head.label in beside:
                refuse_other_values(checkpoint, tensors, beside[head.label])
                continue
            if weights is checkpoint.head:
                beside[head.label] = tensors
            found.append(StoredHead(checkpoint, weights, head))
    return tuple(found)


def choose(checkpoint: Checkpoint, wanted: str | None, how: str) -> StoredHead | None:
    """The one value head to score with, None when there is none; `wanted` is the first part of its names.

    Raises CheckpointError for several and no `wanted` (`how` tells the user where to say it), for a head that does not
    give one score from one hidden state, and for one that only resembles a head.
    """
    heads = [head for head in stored_heads(checkpoint) if wanted in (None, head.head.label, head.head.layout.prefix)]
    if not heads:
        _refuse_lookalike(checkpoint, wanted)
        return None
    if len(heads) > 1:
        raise CheckpointError(checkpoint.path, f"several value heads: {'; '.join(map(str, heads))}", how)
    [chosen] = heads
    path, label = checkpoint.path / chosen.weights.name, chosen.head.label
    choose_head(path, chosen.weights.tensors, checkpoint.config, label)  # refuses one that is there twice
    if chosen.head.outputs != 1:
        raise CheckpointError(path, f"{chosen} has {chosen.head.outputs} outputs, and a value head has one")
    if chosen.head.layout.form not in ("linear", "mlp"):
        problem = f"{chosen} is more than layers on the last hidden state"
        raise CheckpointError(path, problem, "score with the framework that trained it")
    return chosen


def _refuse_lookalike(checkpoint: Checkpoint, wanted: str | None) -> None:
    """Raise for tensors that are named as a head and are none, such as a classifier of two labels."""
    labels = [wanted] if wanted else [layout.label for layout in layouts_for(checkpoint.config)]
    for weights in checkpoint.weights:
        names = bare_names(weights.tensors).values()
        label = next((label for label in labels if any(name.startswith(f"{label}.") for name in names)), wanted)
        if label:
            choose_head(checkpoint.path / weights.name, weights.tensors, checkpoint.config, label)


def read(weights: Weights, names: Iterable[str]) -> "dict[str, torch.Tensor]":
    """The named tensors, by their names on disk, as they are stored."""
    import torch
    from safetensors import safe_open

    wanted = set(names)
    tensors: dict[str, Any] = {}
    for file in weights.files:
        here = wanted & file.tensors.keys()
        if file.is_safetensors:
            with safe_open(file.path, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in here}
        elif here:
            saved = torch.load(file.path, map_location="cpu", weights_only=True)
            tensors |= {name: saved[name] for name in here}
    return tensors
