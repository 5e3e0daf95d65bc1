"""Names as torch.compile, DDP, FSDP and activation checkpointing leave them: the model behind them is the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import heads
import pytest
import torch
from safetensors.torch import save_file
from test_fix_valuehead import logits

from tools.heads.wrappers import bare_names
from tools.postprocess.fix_valuehead import fix_valuehead
from tools.postprocess.verify import verify


class Wrapper(torch.nn.Module):
    """TRL's wrapper, as its modules are nested."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.pretrained_model = model
        self.v_head = torch.nn.Module()
        self.v_head.summary = torch.nn.Linear(32, 1)


def _regional(model: Any) -> torch.nn.Module:
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = torch.compile(layer)
    return Wrapper(model)


# The state dicts of the real wrappers, by their real names.
LIVE: dict[str, Callable[[Any], torch.nn.Module]] = {
    "zero-3": Wrapper,
    "compiled": lambda model: torch.compile(Wrapper(model)),
    "compiled inside": lambda model: Wrapper(torch.compile(model)),
    "each layer compiled": _regional,
    "data parallel": lambda model: torch.nn.DataParallel(Wrapper(model)),
    "compiled, then data parallel": lambda model: torch.nn.DataParallel(torch.compile(Wrapper(model))),
    "data parallel, then compiled": lambda model: torch.compile(torch.nn.DataParallel(Wrapper(model))),
}
FSDP, CHECKPOINTED = "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."
# FSDP and checkpoint_wrapper clean the names in their own state_dict; named_parameters() and raw gathers do not.
RAW: dict[str, Callable[[str], str]] = {
    "fsdp around all": lambda name: f"{FSDP}{name}",
    "fsdp around each layer": lambda name: f"{FSDP}{name.replace('layers.0.', f'layers.0.{FSDP}')}",
    "fsdp with checkpointing": lambda name: f"{FSDP}{name.replace('layers.1.', f'layers.1.{FSDP}{CHECKPOINTED}')}",
    "checkpointing of one layer": lambda name: name.replace("layers.1.mlp.", f"layers.1.mlp.{CHECKPOINTED}"),
}


def checked(path: Path, tiny: Path, names: set[str]) -> None:
    """The split model has the names and the logits of the tiny one."""
    report = fix_valuehead(path)
    assert report.changed
    assert "dropped from" in report.summary
    assert (path / "value_head.safetensors").exists() == any("v_head" in name for name in names)
    assert torch.equal(logits(path), logits(tiny))
    assert verify(path, against=None).summary == "whole"
    assert not fix_valuehead(path).changed


@pytest.mark.parametrize("how", LIVE)
def test_state_dicts_of_the_wrappers_themselves(how: str, tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = heads.flat(tiny, tmp_path / "checkpoint")
    state = LIVE[how](AutoModelForCausalLM.from_pretrained(tiny)).state_dict()
    save_file(dict(state), path / "model.safetensors", metadata={"format": "pt"})
    checked(path, tiny, set(state))


@pytest.mark.parametrize("with_head", [True, False], ids=["with a head", "without"])
@pytest.mark.parametrize("how", RAW)
def test_names_that_were_not_cleaned(how: str, with_head: bool, tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = heads.flat(tiny, tmp_path / "checkpoint")
    tensors = load_file(tiny / "model.safetensors") | (heads.HEAD if with_head else {})
    wrapped = {RAW[how](name): tensor for name, tensor in tensors.items()}
    assert bare_names(wrapped) == {RAW[how](name): name for name in tensors}
    save_file(wrapped, path / "model.safetensors", metadata={"format": "pt"})
    checked(path, tiny, set(wrapped))
