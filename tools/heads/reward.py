"""A reward model in any layout: a decoder, and one linear layer that scores its last hidden state."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from tools.checkpoint.change import Stored, stored
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint, Weights
from tools.heads.classifiers import SCORE_BIAS, SEQUENCE_HEAD, Family
from tools.heads.finding import architectures_of, choose_head, find_heads
from tools.heads.numbers import number_of
from tools.heads.wrappers import strip_wrappers

SEQUENCE, TOKEN, VALUE_HEAD = FORMS = ("sequence-classification", "token-classification", "value-head")
LM_HEAD = ("lm_head.weight", "lm_head.bias")
# What DeepSpeed-Chat puts before the names of the bare decoder.
_BARE_DECODER = "rwtransformer."


@dataclass(frozen=True)
class RewardModel:
    """`decoder` and `lm_head` by their names in a causal LM; `weight` is [1, hidden], `bias` its stored [1] if any.

    `constant` is the bias as a number, which a sequence classifier keeps in config.json.
    """

    form: str
    decoder: Mapping[str, Stored]
    lm_head: Mapping[str, Stored]
    weight: Stored
    bias: Stored | None
    constant: float

    @property
    def head_names(self) -> tuple[str, ...]:
        return tuple(source.name for source in (self.weight, self.bias) if source)


def read_reward_model(source: Checkpoint, family: Family, wanted: str | None) -> RewardModel:
    """The parts of the reward model, told by names, shapes and `architectures`; `wanted` names one of several heads.

    Raises CheckpointError for a head that is not one linear layer with one output, and for tensors that belong neither
    to the decoder nor to its lm_head.
    """
    model = source.model
    if model is None:
        raise CheckpointError(source.path, "holds no decoder", "name the directory of the whole model")
    form, head = _find_head(source, model, family, wanted)
    if not head:
        raise _no_head(source, model, family)
    weight, bias = _linear(source, head)
    inside = {source.name for source in head.values() if source.file in model.files}
    decoder, lm_head = _rest(source, model, family, inside)
    kept = (source.config or {}).get(SCORE_BIAS, 0.0) if form == SEQUENCE else 0.0
    if weight.shape[1] not in {tensor.shape[-1] for tensor in decoder.values() if tensor.shape}:
        problem = f"{weight.name} {list(weight.shape)}: no tensor of the decoder is as wide as that"
        raise CheckpointError(source.path, problem, "is it the head of another model?")
    constant = number_of(bias) if bias else kept
    if type(constant) not in (int, float) or not abs(constant) <= sys.float_info.max:  # also refuses NaN
        raise CheckpointError(source.path, f"the bias of its head is {constant}, not a finite number")
    return RewardModel(form, decoder, lm_head, weight, bias, float(constant))


def _find_head(
    source: Checkpoint, model: Weights, family: Family, wanted: str | None
) -> tuple[str, Mapping[str, Stored]]:
    tensors, architectures = stored(model), architectures_of(source.config)
    for form, architecture, layer in (
        (SEQUENCE, family.sequence, SEQUENCE_HEAD),
        (TOKEN, family.token_class, family.token),
    ):
        if architecture in architectures and wanted in (None, layer):
            own = {n: s for n, s in tensors.items() if strip_wrappers(n).startswith(f"{layer}.")}
            if source.head:
                raise _two_places(source, architecture, own, source.head)
            return form, own
    path = source.path / model.name
    head = choose_head(path, model.tensors, source.config, wanted)
    if source.head:
        if head:
            problem = f"{', '.join(head.names)} is in the weights, and a head in {source.head.name} too"
            raise CheckpointError(source.path, problem, "run tools fix-valuehead first")
        return VALUE_HEAD, stored(source.head)
    declared = find_heads(model.tensors, source.config) if head is None else (head,)
    if len(declared) > 1:
        names = ", ".join(name for each in declared for name in each.names)
        raise CheckpointError(path, f"several value heads: {names}", "choose one with --head")
    return VALUE_HEAD, {name: tensors[name] for each in declared for name in each.names}


def _two_places(source: Checkpoint, architecture: str, own: Mapping[str, Stored], file: Weights) -> CheckpointError:
    if not own:
        problem = f"config.json says {architecture}, and its head was split into {file.name}"
        return CheckpointError(source.path, problem, "run tools join-valuehead first")
    problem = f"{', '.join(own)} is in the weights, and a head in {file.name} too"
    return CheckpointError(source.path, problem, "keep one of the two: move the file away if it is not the head")


def _no_head(source: Checkpoint, model: Weights, family: Family) -> CheckpointError:
    known = (f"{family.base}.", _BARE_DECODER, *LM_HEAD)
    odd = [f"{n} {list(t.shape)}" for n, t in sorted(model.tensors.items()) if not strip_wrappers(n).startswith(known)]
    problem = "no value head in the weights or beside them"
    if odd:
        problem = f"no value head of one linear layer; beside the decoder there is {', '.join(odd[:8])}"
    return CheckpointError(source.path, problem)


def _linear(source: Checkpoint, head: Mapping[str, Stored]) -> tuple[Stored, Stored | None]:
    """Weight [1, hidden] and bias [1] or None."""
    weights, others = ([s for n, s in head.items() if n.endswith(".weight") is it_is] for it_is in (True, False))
    is_linear = len(weights) == 1 and len(weights[0].shape) == 2 and weights[0].shape[0] == 1
    is_bias = [bias.name.endswith(".bias") and bias.shape == (1,) for bias in others]
    if not is_linear or is_bias not in ([], [True]):
        shown = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in head.items())
        raise CheckpointError(source.path, f"{shown}: not one linear layer with one output, as classifiers have")
    return weights[0], others[0] if others else None


def _rest(
    source: Checkpoint, model: Weights, family: Family, head: set[str]
) -> tuple[dict[str, Stored], dict[str, Stored]]:
    """The tensors of the decoder and those of lm_head, by their names in a causal LM."""
    decoder: dict[str, Stored] = {}
    lm_head: dict[str, Stored] = {}
    for name, tensor in stored(model).items():
        if name in head:
            continue
        bare = strip_wrappers(name)
        if _BARE_DECODER in name and not bare.startswith((f"{family.base}.", *LM_HEAD)):
            bare = f"{family.base}.{bare.removeprefix(_BARE_DECODER)}"
        part = lm_head if bare in LM_HEAD else decoder
        if bare in part:
            raise CheckpointError(source.path, f"{part[bare].name} and {name} are the same parameter", "keep one")
        if part is decoder and not bare.startswith(f"{family.base}."):
            problem = f"{name} is neither of the decoder of {family.causal} nor of its value head"
            raise CheckpointError(source.path / model.name, problem)
        part[bare] = tensor
    return _with_embeddings(source, model, family, decoder, lm_head)


def _with_embeddings(
    source: Checkpoint, model: Weights, family: Family, decoder: dict[str, Stored], lm_head: dict[str, Stored]
) -> tuple[dict[str, Stored], dict[str, Stored]]:
    """The same with tied embeddings under the name that the decoder has for them, where a save kept lm_head alone.

    safetensors' save_model notes the name that it dropped, and the one that it kept, in the metadata of the file.
    """
    tied = lm_head.get(LM_HEAD[0]) if family.is_tied(source.config or {}) else None
    if tied is None:
        return decoder, lm_head
    noted = {strip_wrappers(name): strip_wrappers(kept) for name, kept in tied.file.metadata.items()}
    names = [
        name
        for name, kept in noted.items()
        if kept in LM_HEAD and name.startswith(f"{family.base}.") and name not in decoder
    ]
    if names:
        return decoder | {names[0]: tied}, {}
    if not any(tensor.shape == tied.shape for tensor in decoder.values()):
        problem = f"the tied embeddings are here as {tied.name} alone, not as a part of the decoder"
        raise CheckpointError(source.path / model.name, problem, "save it with save_pretrained")
    return decoder, lm_head
