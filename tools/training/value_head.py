# ruff: noqa: TID253 - imported only by the reward stage, and by callers that have torch loaded
"""A causal LM with a value head: one score for each sequence, and how both are saved and loaded back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint, Weights

HEAD_FILE = "value_head.safetensors"
_OF_THIS_RUN = "is it a checkpoint of this run?"
HEAD_KEYS = ("v_head.summary.weight", "v_head.summary.bias")  # [1, hidden], [1], in the layout of TRL


class ValueHead(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """`summary`: a linear map from the hidden state to one score, always in float32."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.summary = nn.Linear(hidden_size, 1, dtype=torch.float32)
        nn.init.normal_(self.summary.weight, std=(hidden_size + 1) ** -0.5)
        nn.init.zeros_(self.summary.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            scores: torch.Tensor = self.summary(hidden.float()).squeeze(-1)  # [batch, hidden] -> [batch]
        return scores


class ValueHeadModel(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A decoder, with or without PEFT adapter, whose last hidden state is scored; its `lm_head` never runs."""

    accepts_loss_kwargs = False
    main_input_name = "input_ids"

    def __init__(self, decoder: Any):
        super().__init__()
        self.decoder = decoder
        self.v_head = ValueHead(decoder.get_output_embeddings().weight.shape[1])
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
        """Score each sequence at its last token: int64 [batch, length] twice -> float32 [batch]."""
        model = self.decoder.get_base_model() if self.has_adapter else self.decoder
        backbone = model.base_model  # everything but lm_head; the adapter's layers are inside
        hidden = backbone(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = (attention_mask * position).argmax(-1)  # padding on either side -> [batch]
        scores: torch.Tensor = self.v_head(hidden[torch.arange(len(last), device=last.device), last])
        return scores

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        self.decoder.gradient_checkpointing_enable(**kwargs)

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        self.decoder.activation_checkpointing_enable(**kwargs)


def save(model: ValueHeadModel, folder: Path, *, max_shard_size: str = "50GB") -> None:
    """Write the decoder and its head.

    A full model gets the head among its own tensors, under `HEAD_KEYS`, as TRL writes it; `config.json` stays that of
    the plain causal LM. An adapter gets it in `value_head.safetensors`.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    head = {f"v_head.{name}": tensor.detach().cpu() for name, tensor in model.v_head.state_dict().items()}
    if model.has_adapter:
        model.decoder.save_pretrained(folder)
        save_file(head, folder / HEAD_FILE, metadata={"format": "pt"})
    else:
        tensors = {**model.decoder.state_dict(), **head}
        model.decoder.save_pretrained(folder, state_dict=tensors, max_shard_size=max_shard_size)


def load(path: Path, base: Path | None = None) -> ValueHeadModel:
    """The model of a checkpoint with its head, which may be inside the weights or in a file of its own.

    For an adapter, `base` is the model it belongs to, by default the one that its config names. Raises CheckpointError
    when there is no head, and for an adapter that was trained on a changed base.
    """
    from tools.checkpoint.adapters import changes_base
    from tools.logits import load_model

    adapter = Checkpoint.open(path).adapter_config or {}
    if changes_base(init := adapter.get("init_lora_weights", True)):
        raise CheckpointError(path, f"trained on a base that {init} changed", "run `tools convert-pissa` on it first")
    head = read_head(path)
    loaded = ValueHeadModel(load_model(path, base))
    _set_head(loaded, head)
    loaded.eval()
    return loaded


def restore(model: ValueHeadModel, folder: Path) -> None:
    """Put the weights of a checkpoint of the same run into the model, in place; the head may have been split out since.

    Raises CheckpointError when a tensor of the model, or the head, is not there.
    """
    head = read_head(folder)
    if model.has_adapter:
        model.decoder.load_adapter(folder, model.decoder.active_adapters[0], is_trainable=True)
    else:
        _restore_decoder(model.decoder, folder)
    _set_head(model, head)


def read_head(folder: Path) -> dict[str, torch.Tensor]:
    """The two tensors of the head under `HEAD_KEYS`, float32 [1, hidden] and [1].

    Looked for in value_head.safetensors, value_head.bin and the weights. Raises CheckpointError when it is in none.
    """
    checkpoint = Checkpoint.open(folder)
    for weights in (checkpoint.head, checkpoint.model):
        if weights and set(HEAD_KEYS) <= weights.tensors.keys():
            found = _read(weights, HEAD_KEYS)
            return {name: tensor.float() for name, tensor in found.items()}
    raise CheckpointError(
        folder, f"no value head: {HEAD_KEYS[0]} is neither in {HEAD_FILE} nor in the weights", "was it moved elsewhere?"
    )


def _set_head(model: ValueHeadModel, head: Mapping[str, torch.Tensor]) -> None:
    model.v_head.load_state_dict({name.removeprefix("v_head."): tensor for name, tensor in head.items()})


def _restore_decoder(decoder: nn.Module, folder: Path) -> None:
    weights = Checkpoint.open(folder).model
    if weights is None:
        raise CheckpointError(folder, "no model weights", _OF_THIS_RUN)
    own = decoder.state_dict()
    tensors = _read(weights, [name for name in weights.tensors if name not in HEAD_KEYS])
    if foreign := sorted(tensors.keys() - own.keys()):
        raise CheckpointError(folder / weights.name, f"{foreign[0]} is not of this model", _OF_THIS_RUN)
    saved = {own[name].data_ptr() for name in tensors}  # a tied tensor is saved under one of its names
    if missing := [name for name, tensor in own.items() if tensor.data_ptr() not in saved]:
        raise CheckpointError(folder / weights.name, f"no {missing[0]}", _OF_THIS_RUN)
    decoder.load_state_dict(tensors, strict=False)


def _read(weights: Weights, names: Any) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    tensors: dict[str, torch.Tensor] = {}
    for file in weights.files:
        here = [name for name in names if name in file.tensors]
        if file.is_safetensors:
            with safe_open(file.path, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in here}
        elif here:
            stored = torch.load(file.path, map_location="cpu", weights_only=True)
            tensors |= {name: stored[name] for name in here}
    return tensors
