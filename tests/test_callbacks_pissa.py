"""PissaConvertCallback: three adapters at the end of a run, and the model in memory as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import adapters
import pytest
import torch
from peft import LoraConfig, get_peft_model
from snapshots import contents
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from tools.checkpoint.errors import CheckpointError
from tools.postprocess.convert_pissa import convert_pissa
from tools.training.callbacks import PissaConvertCallback


class Rows(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(6) + index
        return {"input_ids": ids, "labels": ids.clone()}


def wrapped(base: Path, init: Any = "pissa_niter_4", name: str = "default", **options: Any) -> Any:
    torch.manual_seed(1)
    options = {"target_modules": ["q_proj", "v_proj"]} | options
    config = LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=init, **options)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), config, adapter_name=name)


def run(model: Any, folder: Path, *callbacks: TrainerCallback, steps: int = 3, resume: Any = None) -> None:
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=2,
        learning_rate=0.02,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(model, args, train_dataset=Rows(), callbacks=[*callbacks]).train(resume_from_checkpoint=resume)


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(adapters.IDS).logits


class Before(TrainerCallback):
    """What the model in memory is when the last step is done; made after the callback that is tested."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.names, self.active = list(model.peft_config), model.active_adapter
        self.configs = {name: deepcopy(config.to_dict()) for name, config in model.peft_config.items()}
        self.parameters = {name: parameter.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["default", "mine"])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_pi_18_the_live_model_is_as_it_was_and_the_converted_one_its_equal(
    name: str, options: dict[str, Any], tiny: Path, tmp_path: Path
) -> None:
    model, before = wrapped(tiny, name=name, **options), Before()
    run(model, tmp_path, PissaConvertCallback(), before)
    assert (list(model.peft_config), model.active_adapter) == (before.names, before.active)
    assert {key: config.to_dict() for key, config in model.peft_config.items()} == before.configs
    assert all(torch.equal(parameter, before.parameters[key]) for key, parameter in model.named_parameters())
    assert (adapters.logits_on(tiny, tmp_path / "pissa_converted") - logits(model)).abs().max() < 1e-5
    for folder, rank in (("pissa_init", 4), ("pissa_backup", 4), ("pissa_converted", 8)):
        config = adapters.config_of(tmp_path / folder)
        assert (config["r"], config["init_lora_weights"]) == (rank, True)


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    before = contents(folder)
    yield
    assert contents(folder) == before


def test_a_resumed_run_keeps_the_first_initial_adapter_and_converts_what_it_has_now(tiny: Path, tmp_path: Path) -> None:
    run(wrapped(tiny), tmp_path, PissaConvertCallback(), steps=2)
    first = contents(tmp_path / "pissa_converted")
    model = wrapped(tiny)
    with unchanged(tmp_path / "pissa_init"):
        run(model, tmp_path, PissaConvertCallback(), steps=4, resume=True)
    assert contents(tmp_path / "pissa_converted") != first
    assert not list(tmp_path.glob(".pissa*"))
    with unchanged(tmp_path / "pissa_converted"):
        convert_pissa(tmp_path / "pissa_backup", init=tmp_path / "pissa_init", output=tmp_path / "pissa_converted")


def test_an_adapter_that_could_never_be_converted_is_refused_at_the_start(base: Path, tmp_path: Path) -> None:
    model = wrapped(base, target_modules=["q_proj", "lm_head"])
    with pytest.raises(CheckpointError, match="on lm_head, which is tied to the embedding, can never be converted"):
        run(model, tmp_path / "run", PissaConvertCallback())


def test_another_run_in_the_same_folder_is_refused(tiny: Path, tmp_path: Path) -> None:
    run(wrapped(tiny), tmp_path, PissaConvertCallback())
    model = wrapped(tiny)
    torch.manual_seed(8)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "lora_A" in name).add_(1)
    with unchanged(tmp_path), pytest.raises(CheckpointError, match="the initial adapter of another start"):
        run(model, tmp_path, PissaConvertCallback())


@pytest.mark.parametrize("init", [True, "gaussian"])
def test_plain_lora_leaves_nothing_behind(init: Any, tiny: Path, tmp_path: Path) -> None:
    run(wrapped(tiny, init), tmp_path, PissaConvertCallback())
    assert not list(tmp_path.glob("pissa*"))
