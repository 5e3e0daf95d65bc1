"""The catalogue of value, reward and critic heads: how each framework names its tensors, and their shapes."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

# linear: one matrix. mlp: Linear, ReLU, Linear. dense: Linear, tanh, Linear. branch: decoder layers of its own, then an
# mlp. q-heads: mlps that score every token of the vocabulary, and an mlp that scores the text.
Form = Literal["linear", "mlp", "dense", "branch", "q-heads"]


@dataclass(frozen=True)
class HeadLayout:
    """The head of one family of frameworks.

    `parts` maps what follows `prefix.` in a name (`*`: anything) to a shape in symbols: `1 H` is one output for a
    hidden state of any width, `2H` twice that width, `...` any shape. Each part must be there, those of `optional` may.
    `files` are the files it is left in, without suffix, the first being the usual one. `declared_by` are ends of names
    in `config.architectures` whose model has this head as a part of its own. `companions` are prefixes of tensors that
    the framework saves beside it, and that are neither head nor model.
    """

    frameworks: str
    prefix: str
    form: Form
    parts: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ("model", "value_head")
    declared_by: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What `--head` calls it."""
        return self.prefix.removeprefix(_PEFT).split(".")[0]

    @property
    def in_adapter(self) -> bool:
        """Whether it is one of the tensors of an adapter."""
        return self.files == ("adapter_model",)

    def shape_of(self, name: str) -> str | None:
        """The shape in symbols of the part with this name, None when it is no part of the head."""
        if not name.startswith(f"{self.prefix}."):
            return None
        inner = name.removeprefix(f"{self.prefix}.")
        shapes = {**self.parts, **self.optional}
        return next((shape for part, shape in shapes.items() if fnmatchcase(inner, part)), None)

    def outputs(self, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> int | None:
        """How many numbers a head of these parts gives, None when they are not a head of this layout.

        A tensor without elements, as ZeRO-3 leaves one that it did not gather, has any shape.
        """
        sizes: dict[str, int] = {}
        missing = set(self.parts)
        for name, shape in shapes:
            wanted = self.shape_of(name)
            if wanted is None or not (0 in shape or _fits(shape, wanted, sizes)):
                return None
            missing -= {part for part in self.parts if fnmatchcase(name.removeprefix(f"{self.prefix}."), part)}
        return None if missing else sizes.get("labels", 1)


def _fits(shape: tuple[int, ...], wanted: str, sizes: dict[str, int]) -> bool:
    """Whether a shape is the wanted one, each symbol having one size throughout; `sizes` learns those that are new."""
    if wanted == "...":
        return True
    terms = [re.fullmatch(r"(\d*)(\w*)", term) for term in wanted.split()]
    if len(terms) != len(shape):
        return False
    for term, length in zip(terms, shape, strict=True):
        assert term
        factor, symbol = int(term[1] or 1), term[2] or "one"
        known = sizes.setdefault(symbol, 1 if symbol == "one" else length // factor)
        if length != factor * known:
            return False
    return True


_PEFT = "base_model.model."
_LINEAR = {"weight": "1 H"}
_BIAS = {"bias": "1"}
_DENSE = {"dense.weight": "H H", "dense.bias": "H", "out_proj.weight": "1 H", "out_proj.bias": "1"}
_MLP = {"0.weight": "2H H", "0.bias": "2H", "2.weight": "1 2H", "2.bias": "1"}
_Q_HEAD = {"0.weight": "2H H", "0.bias": "2H", "2.weight": "V 2H", "2.bias": "V"}
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
_REWARD_MODELS = ("RewardModel", "CriticModel")
_CRITIC = HeadLayout("OpenRLHF", "value_head", "linear", _LINEAR, declared_by=_REWARD_MODELS)

LAYOUTS = (
    HeadLayout("TRL, LLaMA-Factory", "v_head.summary", "linear", {**_LINEAR, **_BIAS}),
    HeadLayout("DeepSpeed-Chat, InternLM2", "v_head", "linear", _LINEAR, declared_by=_REWARD_MODELS),
    _CRITIC,
    HeadLayout("reward models", "reward_head", "linear", _LINEAR, _BIAS),
    HeadLayout("NeMo-Aligner", "rm_head", "linear", {"weight": "labels H"}, {"bias": "labels"}),
    HeadLayout("verl and NeMo-RL on Megatron", "output_layer", "linear", _LINEAR),
    HeadLayout("trlx PPO", "v_head", "mlp", _MLP, companions=("frozen_head.",)),
    HeadLayout(
        "trlx PPO with value layers",
        "v_head",
        "branch",
        {"decoder_blocks.*": "...", **{f"lm_head.{part}": shape for part, shape in _MLP.items()}},
        {"final_norm.*": "..."},
        companions=("frozen_head.",),
    ),
    HeadLayout(
        "trlx ILQL",
        "ilql_heads",
        "q-heads",
        {
            **{f"v_head.{part}": shape for part, shape in _MLP.items()},
            **{f"{kind}.*.{part}": s for kind in ("q_heads", "target_q_heads") for part, s in _Q_HEAD.items()},
        },
    ),
    HeadLayout(
        "sequence and token classifiers, OpenRLHF",
        "score",
        "linear",
        _LINEAR,
        _BIAS,
        declared_by=(*_CLASSIFIERS, *_REWARD_MODELS),
    ),
    HeadLayout(
        "Qwen reward models",
        "score",
        "mlp",
        {"0.weight": "H H", "0.bias": "H", "2.weight": "labels H", "2.bias": "labels"},
        declared_by=("RewardModel",),
    ),
    HeadLayout("sequence and token classifiers", "classifier", "linear", _LINEAR, _BIAS, declared_by=_CLASSIFIERS),
    HeadLayout("RoBERTa classifiers", "classifier", "dense", _DENSE, declared_by=_CLASSIFIERS),
    HeadLayout("T5 and BART classifiers", "classification_head", "dense", _DENSE, declared_by=_CLASSIFIERS),
    *(
        HeadLayout("PEFT classifiers", f"{_PEFT}{name}", "linear", _LINEAR, _BIAS, files=("adapter_model",))
        for name in ("score", "classifier")
    ),
)


def layouts_for(config: Mapping[str, Any] | None) -> tuple[HeadLayout, ...]:
    """The catalogue, with OpenRLHF's head under the name that `value_head_prefix` of a config.json gives it."""
    prefix = (config or {}).get("value_head_prefix")
    if not isinstance(prefix, str) or not prefix.isidentifier() or prefix in {layout.prefix for layout in LAYOUTS}:
        return LAYOUTS
    return (*LAYOUTS, replace(_CRITIC, prefix=prefix))
