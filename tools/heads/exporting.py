"""The plan of an export: a reward model in another layout, as a classifier or with a value head."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.checkpoint.change import Change, Content, Source, Stored, TensorFile, json_file, refuse_ungathered, stored
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.checkpoint.shards import rewritten
from tools.heads.classifiers import (
    SCORE_BIAS,
    SEQUENCE_HEAD,
    Family,
    causal_config,
    classifier_config,
    family_of,
    has_one_label,
)
from tools.heads.numbers import constant
from tools.heads.padding import pad_token_id
from tools.heads.reward import LM_HEAD, SEQUENCE, VALUE_HEAD, RewardModel, read_reward_model
from tools.hub import local_copy


@dataclass(frozen=True)
class _Layout:
    """The reward model in one layout: tensors of its weights, its config.json, other files, and what was said of it."""

    tensors: Mapping[str, Source]
    config: Mapping[str, Any]
    summary: str
    details: Mapping[str, Any]
    files: Mapping[str, Content | None]


def export_plan(source: Checkpoint, form: str, head: str | None, base: Path | None) -> Change:
    """The change that gives a reward model the layout `form`; `head` names one of several, `base` has the lm_head.

    Raises CheckpointError for what is no reward model of one linear layer, and for families without such a class.
    """
    if source.kind == "adapter":
        raise CheckpointError(source.path, "an adapter, not a whole model", "merge it first: tools merge-adapter")
    refuse_ungathered(source)
    family = family_of(source.path, source.config)
    model = read_reward_model(source, family, head)
    if model.form == form and (form == VALUE_HEAD or has_one_label(source.config or {})):
        return Change(f"a {form} model already; nothing to do")
    if form == VALUE_HEAD:
        layout = _value_head(source, family, model, base)
    else:
        layout = (_sequence if form == SEQUENCE else _token)(source, family, model)
    assert source.model is not None
    files = {**rewritten(source.model, layout.tensors), "config.json": json_file(layout.config)}
    if source.head:
        files |= {file.name: None for file in source.head.files}
    left_out = {} if form == VALUE_HEAD or not model.lm_head else {"left out": [s.name for s in model.lm_head.values()]}
    dropped = frozenset(s.name for s in (*model.lm_head.values(), model.bias) if s)
    return Change(layout.summary, {**files, **layout.files}, {**layout.details, **left_out}, dropped)


def _sequence(source: Checkpoint, family: Family, model: RewardModel) -> _Layout:
    if family.sequence is None:
        raise _no_class(source, "sequence", "--to token-classification")
    pad = pad_token_id(source)
    if pad is None:
        problem = f"no pad_token_id in config.json or the tokenizer, and {family.sequence} finds the last token by it"
        raise CheckpointError(source.path, problem, "add pad_token_id to config.json")
    bias = {SCORE_BIAS: model.constant} if model.constant else {}
    config = classifier_config(source.config or {}, family.sequence, pad) | bias
    tensors: dict[str, Source] = {**model.decoder, f"{SEQUENCE_HEAD}.weight": model.weight}
    summary = f"{family.sequence} with one label"
    if model.constant:
        summary += f"; its scores lack the bias {model.constant:g}, which config.json keeps as {SCORE_BIAS}"
    notes = {"pad_token_id": _pad_note(source, pad)}
    return _Layout(tensors, config, summary, _details(source, model) | notes, {})


def _token(source: Checkpoint, family: Family, model: RewardModel) -> _Layout:
    if family.token_class is None:
        raise _no_class(source, "token", "--to sequence-classification")
    config = classifier_config(source.config or {}, family.token_class, pad_token_id(source))
    tensors: dict[str, Source] = {
        **model.decoder,
        f"{family.token}.weight": model.weight,
        f"{family.token}.bias": _bias(model),
    }
    return _Layout(tensors, config, f"{family.token_class} with one label, exact", _details(source, model), {})


def _value_head(source: Checkpoint, family: Family, model: RewardModel, base: Path | None) -> _Layout:
    assert source.config is not None
    lm_head = model.lm_head or ({} if family.is_tied(source.config) else _lm_head_of(source, model, base))
    config = causal_config(source.config, family)
    head = TensorFile({"v_head.summary.weight": model.weight, "v_head.summary.bias": _bias(model)})
    summary = f"{family.causal} with its value head in value_head.safetensors"
    return _Layout(
        {**model.decoder, **lm_head}, config, summary, _details(source, model), {"value_head.safetensors": head}
    )


def _bias(model: RewardModel) -> Source:
    """The bias [1] as it is stored, or of the number that stands for it, in the dtype of the weight."""
    return model.bias or constant(model.weight.dtype, model.constant)


def _details(source: Checkpoint, model: RewardModel) -> dict[str, Any]:
    config = source.config or {}
    normal = f"(score - {config.get('mean')}) / {config.get('std')}, by mean and std in config.json"
    notes = {"reward": normal} if config.get("normalize_reward") else {}
    return {"head": ", ".join(model.head_names), "bias": model.constant, **notes}


def _pad_note(source: Checkpoint, pad: int) -> str:
    ends = (source.config or {}).get("eos_token_id")
    if pad in (ends if isinstance(ends, list) else [ends]):
        return f"{pad}, which is the end token too: transformers scores a text that ends with it one token early"
    return str(pad)


def _lm_head_of(source: Checkpoint, model: RewardModel, base: Path | None) -> dict[str, Stored]:
    if base is None:
        problem = "has no lm_head, and config.json does not tie it to the embeddings"
        raise CheckpointError(source.path, problem, "name the model it was trained from with --base")
    folder = local_copy(base)
    if folder is None:
        raise CheckpointError(base, "not found")
    found = Checkpoint.open(folder).model
    lm_head = {name: source for name, source in stored(found).items() if name in LM_HEAD} if found else {}
    if LM_HEAD[0] not in lm_head:
        raise CheckpointError(folder, "has no lm_head.weight", "are its embeddings tied? then set that in config.json")
    rows, columns = (source.config or {}).get("vocab_size"), model.weight.shape[1]
    if lm_head[LM_HEAD[0]].shape != (rows, columns):
        problem = (
            f"lm_head.weight is {list(lm_head[LM_HEAD[0]].shape)}, the decoder of {source.path} needs {[rows, columns]}"
        )
        raise CheckpointError(folder, problem, "is it the model it was trained from?")
    return lm_head


def _no_class(source: Checkpoint, what: str, remedy: str) -> CheckpointError:
    kind = (source.config or {}).get("model_type")
    return CheckpointError(source.path, f"transformers has no {what} classifier for {kind}", f"try {remedy}")
