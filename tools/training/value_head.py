# ruff: noqa: TID253 - imported only by the reward stage, and by callers that have torch loaded
"""A causal LM with a value head: one score for each sequence, and how both are saved and loaded back."""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint
from tools.training.decoder import load_decoder
from tools.training.stored_head import StoredHead, choose, read, stored_heads

HEAD_FILE = "value_head.safetensors"
HEAD_KEYS = ("v_head.summary.weight", "v_head.summary.bias")  # [1, hidden], [1], in the layout of TRL
_OF_THIS_RUN = "is it a checkpoint of this run?"
_CHOICE = "choose one by head="


class ValueHead(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """`summary`: a linear map from the hidden state to one score, always in float32."""

    prefix = "v_head"

    def __init__(self, hidden_size: int):
        super().__init__()
        self.summary = nn.Linear(hidden_size, 1, dtype=torch.float32)
        nn.init.normal_(self.summary.weight, std=(hidden_size + 1) ** -0.5)
        nn.init.zeros_(self.summary.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            scores: torch.Tensor = self.summary(hidden.float()).squeeze(-1)  # [batch, hidden] -> [batch]
        return scores

    @torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not typed here
    def normalise(self, mean: float, deviation: float) -> None:
        """Give (score - mean) / deviation from now on."""
        self.summary.weight /= deviation
        self.summary.bias.sub_(mean).div_(deviation)


class MLPValueHead(nn.Sequential):  # type: ignore[misc]  # torch is not typed here
    """Linear, ReLU, Linear from the hidden state to one score, in float32: that of trlx, twice as wide as the hidden
    state, and of Qwen's reward models. `prefix` is what its names start with in a checkpoint."""

    def __init__(self, hidden_size: int, width: int, prefix: str):
        super().__init__(
            nn.Linear(hidden_size, width, dtype=torch.float32), nn.ReLU(), nn.Linear(width, 1, dtype=torch.float32)
        )
        self.prefix = prefix

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            scores: torch.Tensor = super().forward(hidden.float()).squeeze(-1)  # [batch, hidden] -> [batch]
        return scores


class ValueHeadModel(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A decoder, with or without PEFT adapter, whose last hidden state is scored; its `lm_head` never runs.

    Without `head` it gets a new one.
    """

    accepts_loss_kwargs = False
    main_input_name = "input_ids"

    def __init__(self, decoder: Any, head: ValueHead | MLPValueHead | None = None):
        super().__init__()
        self.decoder = decoder
        self.v_head = head or ValueHead(_hidden_size(decoder))
        self.v_head.to(decoder.device)

    @property
    def config(self) -> Any:
        return self.decoder.config

    @property
    def generation_config(self) -> Any:
        return self.decoder.generation_config

    @property
    def has_adapter(self) -> bool:
        return hasattr(self.decoder, "peft_config")

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Score each sequence at its last token that is no padding: int64 [batch, length] twice -> float32 [batch].

        Padding may be on either side and does not change the score: positions count from the first token.
        """
        model = self.decoder.get_base_model() if self.has_adapter else self.decoder
        backbone = model.base_model  # everything but lm_head; the adapter's layers are inside
        at = positions(backbone, attention_mask)
        outputs = backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **at)
        scores: torch.Tensor = self.v_head(at_last_token(outputs.last_hidden_state, attention_mask))
        return scores

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        self.decoder.gradient_checkpointing_enable(**kwargs)

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        self.decoder.activation_checkpointing_enable(**kwargs)


def save(model: ValueHeadModel, folder: Path, *, max_shard_size: str = "50GB") -> None:
    """Write the decoder and its head.

    A full model gets the head among its own tensors: a linear one under `HEAD_KEYS`, as TRL writes it, an MLP under the
    names that it had; `config.json` stays that of the decoder. An adapter gets it in `value_head.safetensors`.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = model.v_head.state_dict().items()
    head = {f"{model.v_head.prefix}.{name}": tensor.detach().cpu() for name, tensor in state}
    if model.has_adapter:
        model.decoder.save_pretrained(folder)
        save_file(head, folder / HEAD_FILE, metadata={"format": "pt"})
    else:
        tensors = {**model.decoder.state_dict(), **head}
        model.decoder.save_pretrained(folder, state_dict=tensors, max_shard_size=max_shard_size)


def load(path: Path, base: Path | None = None, *, head: str | None = None, normalised: bool = True) -> ValueHeadModel:
    """The model of a checkpoint with its value head, in eval mode, from any layout whose head can be scored with.

    The decoder keeps the dtype in which it is stored, the head is float32. For an adapter, `base` is the model it
    belongs to, by default the one that its config names; for a full model without config.json, the one whose config it
    has. `head` chooses among several heads, by the first part of their names. Raises CheckpointError when there is no
    head, when it does not give one score from the last hidden state, when a weight would be random, and for an adapter
    that was trained on a changed base. What OpenRLHF takes from its scores outside of training (`normalize_reward`) is
    a part of the head that comes back, unless `normalised` is false.
    """
    checkpoint = Checkpoint.open(path)
    stored = _required(checkpoint, choose(checkpoint, head, _CHOICE))
    decoder = load_decoder(checkpoint, stored_heads(checkpoint), base)
    module = module_of(stored)
    if normalised and isinstance(module, ValueHead):
        module.normalise(*stored.normalisation)
    model = ValueHeadModel(decoder, module)
    model.eval()
    return model


def module_of(stored: StoredHead) -> ValueHead | MLPValueHead:
    """The layers of a head, with its tensors. A linear one without bias gets one of zero, which changes no score."""
    tensors = stored.tensors()
    if stored.is_mlp:
        width, hidden = tensors["0.weight"].shape
        head: ValueHead | MLPValueHead = MLPValueHead(hidden, width, stored.head.label)
    else:
        head = ValueHead(tensors["weight"].shape[1])
        tensors = {f"summary.{name}": tensor for name, tensor in tensors.items()}
    head.load_state_dict(tensors)
    return head


def restore(model: ValueHeadModel, folder: Path) -> None:
    """Put the weights of a checkpoint of the same run into the model, in place; the head may have been split out since.

    Raises CheckpointError when a tensor of the model, or the head, is not there.
    """
    checkpoint = Checkpoint.open(folder)
    stored = _required(checkpoint, choose(checkpoint, None, _OF_THIS_RUN))
    state = module_of(stored).state_dict()
    own = model.v_head.state_dict()
    if {name: tensor.shape for name, tensor in state.items()} != {name: t.shape for name, t in own.items()}:
        raise CheckpointError(folder, f"{stored} is another head than that of the model", _OF_THIS_RUN)
    if model.has_adapter:
        model.decoder.load_adapter(folder, model.decoder.active_adapters[0], is_trainable=True)
    else:
        _restore_decoder(model.decoder, checkpoint, stored)
    model.v_head.load_state_dict(state)


def _required(checkpoint: Checkpoint, stored: StoredHead | None) -> StoredHead:
    if stored is None:
        problem = f"no value head, neither in {HEAD_FILE} nor in the weights"
        raise CheckpointError(checkpoint.path, problem, "was it moved elsewhere?")
    return stored


def _hidden_size(decoder: Any) -> int:
    """What lm_head takes, or in its absence what the embeddings give."""
    embeddings = decoder.get_output_embeddings() or decoder.get_input_embeddings()
    return int(embeddings.weight.shape[1])


def at_last_token(values: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Of each row what stands at its last token that is no padding: [batch, length, ...] -> [batch, ...]."""
    column = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    last = (attention_mask * column).argmax(-1)  # [batch]
    return values[torch.arange(len(last), device=last.device), last]


def positions(model: Any, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """`position_ids` where padding on the left would shift them, and the decoder takes them: [batch, length]."""
    if attention_mask[:, 0].all() or "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0)}


def _restore_decoder(decoder: nn.Module, checkpoint: Checkpoint, head: StoredHead) -> None:
    weights = checkpoint.model
    if weights is None:
        raise CheckpointError(checkpoint.path, "no model weights", _OF_THIS_RUN)
    own = decoder.state_dict()
    tensors = read(weights, [name for name in weights.tensors if name not in head.names])
    if foreign := sorted(tensors.keys() - own.keys()):
        raise CheckpointError(checkpoint.path / weights.name, f"{foreign[0]} is not of this model", _OF_THIS_RUN)
    saved = {own[name].data_ptr() for name in tensors}  # a tied tensor is saved under one of its names
    if missing := [name for name, tensor in own.items() if tensor.data_ptr() not in saved]:
        raise CheckpointError(checkpoint.path / weights.name, f"no {missing[0]}", _OF_THIS_RUN)
    decoder.load_state_dict(tensors, strict=False)
