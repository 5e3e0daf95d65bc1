"""Actor and critic of a PPO trainer in one set of weights: which tensor is whose, under which name."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.checkpoint.change import Stored, same_bytes
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Weights
from tools.heads.classifiers import Family
from tools.heads.wrappers import strip_wrappers

# The modules of the wrapper. The backbone is the decoder inside the value model, once more under another name.
POLICY, VALUE_MODEL, CRITIC_BACKBONE = PARTS = ("policy", "value_model", "critic_backbone")
Tensors = Mapping[str, Stored]


def part_of(name: str) -> str | None:
    """The module of the wrapper that a parameter belongs to, by its name on disk."""
    part = strip_wrappers(name).partition(".")[0]
    return part if part in PARTS else None


def find_parts(path: Path, model: Weights) -> dict[str, Tensors]:
    """The tensors of each module under the names they have in it; names that a save dropped as aliases are back.

    Raises CheckpointError, naming the tensor, for one that belongs to none of the three modules, and for adapters.
    """
    parts: dict[str, dict[str, Stored]] = {part: {} for part in PARTS}
    for name, source in _with_aliases(model):
        part = part_of(name)
        if part is None:
            problem = f"{name} is neither of the policy nor of the value model"
            raise CheckpointError(path, problem, f"the names of an actor-critic checkpoint start with {_OR}")
        bare = strip_wrappers(strip_wrappers(name).removeprefix(f"{part}."))
        if ".lora_" in bare or bare.startswith("base_model."):
            raise CheckpointError(path, f"{name} belongs to an adapter", "merge it into the model before saving")
        if bare in parts[part]:
            raise CheckpointError(path, f"{parts[part][bare].name} and {name} are the same parameter", "keep one")
        parts[part][bare] = source
    return {part: tensors for part, tensors in parts.items() if tensors}


_OR = ", ".join(f"{part}." for part in PARTS[:-1]) + f" or {PARTS[-1]}."


def _with_aliases(model: Weights) -> Iterator[tuple[str, Stored]]:
    """Every tensor, and every name that safetensors' save_model left out for another name of the same tensor.

    It notes them in the metadata of the file: the name that was dropped, and the one that was kept.
    """
    for file in model.files:
        yield from ((name, Stored(file, name)) for name in file.tensors)
        for dropped, kept in file.metadata.items():
            if kept in file.tensors and dropped not in model.tensors:
                yield dropped, Stored(file, kept)
            elif part_of(dropped) and dropped not in model.tensors:
                problem = f"its metadata says that {dropped} is {kept}, which is not there"
                raise CheckpointError(file.path, problem, "save the checkpoint again")


def policy_tensors(path: Path, parts: Mapping[str, Tensors], is_tied: bool) -> Tensors:
    """The causal LM. Where its embeddings are tied, the copy of them that is called lm_head is left out.

    Raises CheckpointError when that copy has other values: loaders would drop one of the two without a word.
    """
    policy = parts[POLICY]
    lm_head = policy.get("lm_head.weight")
    if lm_head is None or not is_tied:
        return policy
    rest = {name: source for name, source in policy.items() if source is not lm_head}
    twins = [name for name, source in rest.items() if source.shape == lm_head.shape]
    if not any(same_bytes(lm_head, rest[name]) for name in twins):
        problem = f"policy.lm_head.weight differs from policy.{twins[0] if twins else 'its embedding'}"
        raise CheckpointError(path, f"{problem}, and config.json ties them", "set tie_word_embeddings in it to false")
    return rest


def critic_tensors(path: Path, parts: Mapping[str, Tensors], family: Family) -> Tensors:
    """The value model, its decoder taken from `critic_backbone` where a save kept it under that name alone.

    Raises CheckpointError when the two copies of a tensor of the decoder differ.
    """
    own = parts.get(VALUE_MODEL, {})
    backbone = {f"{family.base}.{name}": source for name, source in parts.get(CRITIC_BACKBONE, {}).items()}
    for name in own.keys() & backbone.keys():
        if not same_bytes(own[name], backbone[name]):
            other = f"{CRITIC_BACKBONE}{name.removeprefix(family.base)}"
            raise CheckpointError(path, f"{VALUE_MODEL}.{name} and {other} differ", "keep one of the two")
    return {**backbone, **own}
