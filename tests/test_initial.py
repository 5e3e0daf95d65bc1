"""The initial adapter of another run, or one that a resume wrote over, is named before anything is written."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapters
import pytest
import torch
from safetensors.torch import load_file, save_file
from snapshots import contents, state
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tools.checkpoint.errors import CheckpointError
from tools.cli import app
from tools.postprocess.convert_pissa import convert_pissa

FILE = "adapter_model.safetensors"
Spoil = Callable[[adapters.Trained], dict[str, Any]]


def _resumed(run: adapters.Trained) -> dict[str, Any]:
    """A resume saved the weights of checkpoint-2 as those of the start."""
    checkpoint = Path(shutil.copytree(run.adapter, run.adapter.parent / "checkpoint-2"))
    _moved(checkpoint / FILE, 0.05)
    shutil.copyfile(checkpoint / FILE, run.init / FILE)
    return {}


def _trained_a_little(run: adapters.Trained) -> dict[str, Any]:
    _moved(run.init / FILE, 0.01)
    return {}


def _moved(file: Path, by: float) -> None:
    torch.manual_seed(5)
    save_file({name: t + by * torch.randn_like(t) for name, t in load_file(file).items()}, file)


def _of_another_base(run: adapters.Trained) -> dict[str, Any]:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(run.base).config)
    model.save_pretrained(run.base.parent / "other_base")
    kind = adapters.config_of(run.adapter)["init_lora_weights"]
    other = adapters.train(run.base.parent / "other_base", run.adapter.parent / "other", kind)
    return {"init": other.init}


def _in_the_folder_of_runs(run: adapters.Trained) -> dict[str, Any]:
    """What is found above is another run's."""
    other = _of_another_base(run)["init"]
    shutil.rmtree(run.init)
    shutil.move(run.adapter, run.adapter.parent / "mine" / "trained")
    run.adapter.symlink_to("mine/trained")
    shutil.move(other, run.init)
    return {"init": None}


def _without_numbers(run: adapters.Trained) -> dict[str, Any]:
    save_file({name: t * float("nan") for name, t in load_file(run.init / FILE).items()}, run.init / FILE)
    return {}


def _untrained(run: adapters.Trained) -> dict[str, Any]:
    shutil.copyfile(run.adapter / FILE, run.init / FILE)
    return {}


def _is_checkpoint(run: adapters.Trained) -> dict[str, Any]:
    _resumed(run)
    adapters.set_config(run.adapter, init_lora_weights="lora_ga")  # no law says how its factors begin
    return {}


SPOILED: dict[str, tuple[Spoil, str]] = {
    "trained a little": (_trained_a_little, r"pissa_init: .*q_proj is not how {kind} begins \(off by .*%\)"),
    "another base": (_of_another_base, r"other/pissa_init: .* is no part of the base weights \(off by"),
    "found above": (_in_the_folder_of_runs, r"pissa_init: .* is no part of the base weights \(off by"),
    "NaN": (_without_numbers, r"pissa_init: .*q_proj is not how {kind} begins \(off by nan%\)"),
    "the trained one": (_untrained, r"pissa_init: is the same as .*trained: either nothing was trained, or a resume"),
    "a checkpoint": (_is_checkpoint, r"pissa_init: holds what .*checkpoint-2 holds, so a resume wrote over it"),
    "a checkpoint too": (_resumed, r"pissa_init: holds what .*checkpoint-2 holds, so a resume wrote over it"),
}


@pytest.mark.parametrize("why", SPOILED)
@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_a_wrong_initial_adapter_is_named(init: str, why: str, tiny: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny, tmp_path / "base"))
    run = adapters.train(base, tmp_path, init)
    spoil, message = SPOILED[why]
    given = {"init": run.init} | spoil(run)
    before = state(run.adapter)
    with pytest.raises(CheckpointError, match=message.format(kind=init)):
        convert_pissa(run.adapter, **given)
    assert state(run.adapter) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("init", ["pissa", "pissa_niter_2", "olora", "corda"])
@pytest.mark.parametrize("modules", [["q_proj"], ["gate_proj"], ["down_proj"], ["v_proj"]], ids=str)
def test_the_right_one_passes_in_every_dtype(
    init: str, modules: list[str], dtype: torch.dtype, tiny: Path, tmp_path: Path
) -> None:
    run = adapters.train(tiny, tmp_path, init, target_modules=modules)
    for folder in (run.init, run.adapter):
        save_file({name: t.to(dtype) for name, t in load_file(folder / FILE).items()}, folder / FILE)
    assert convert_pissa(run.adapter, init=run.init, base=str(tiny)).changed


def test_an_output_of_another_initial_adapter_is_not_the_one_that_was_made(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path, "lora_ga")
    right = (run.init / FILE).read_bytes()
    _moved(run.init / FILE, 0.05)
    assert convert_pissa(run.adapter, output=tmp_path / "lora").changed
    assert not convert_pissa(run.adapter, output=tmp_path / "lora").changed
    (run.init / FILE).write_bytes(right)
    with pytest.raises(CheckpointError, match="exists"):
        convert_pissa(run.adapter, output=tmp_path / "lora")
    convert_pissa(run.adapter, output=tmp_path / "lora", overwrite=True)
    assert (adapters.logits_on(tiny, tmp_path / "lora") - run.logits).abs().max() < 1e-5


@pytest.mark.parametrize("place", ["pissa_init", "initial_model", "initial_model/default"])
def test_it_is_found_where_trainers_leave_it(place: str, tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path / "made")
    shutil.copytree(run.init, tmp_path / "run" / place)
    shutil.copytree(run.adapter, tmp_path / "run" / "checkpoint-4")
    convert_pissa(tmp_path / "run" / "checkpoint-4")
    assert (adapters.logits_on(tiny, tmp_path / "run" / "checkpoint-4") - run.logits).abs().max() < 1e-5


def _no_init(run: adapters.Trained) -> None:
    shutil.rmtree(run.init)


def _no_weights(run: adapters.Trained) -> None:
    (run.init / FILE).unlink()


def _other_rank(run: adapters.Trained) -> None:
    other = adapters.train(run.base, run.base.parent / "other", r=2)
    shutil.rmtree(run.init)
    shutil.copytree(other.init, run.init)


PI_08 = {
    "a missing directory": (_no_init, "pissa_init: not found"),
    "no weights": (_no_weights, "pissa_init: adapter_config.json but no adapter_model.safetensors"),
    "another rank": (_other_rank, "q_proj.lora_A.weight, but"),
}


@pytest.mark.parametrize("why", PI_08)
def test_pi_08_each_cause_has_a_line_of_its_own(why: str, tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(Path(shutil.copytree(tiny, tmp_path / "base")), tmp_path)
    spoil, message = PI_08[why]
    spoil(run)
    before = contents(run.adapter)
    result = CliRunner().invoke(app, ["convert-pissa", str(run.adapter), "--init", str(run.init)])
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert contents(run.adapter) == before


def test_pi_08_trained_biases_are_no_obstacle(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path, bias="lora_only")
    convert_pissa(run.adapter, init=run.init)
    assert (adapters.logits_on(tiny, run.adapter) - run.logits).abs().max() < 1e-6


def test_pi_10_a_quantised_base_is_refused_and_a_plain_one_accepted(tiny: Path, tmp_path: Path) -> None:
    run = adapters.train(tiny, tmp_path)
    quantised = Path(shutil.copytree(tiny, tmp_path / "quantised"))
    config = (quantised / "config.json").read_text().rstrip().removesuffix("}")
    (quantised / "config.json").write_text(config + ', "quantization_config": {"quant_method": "awq", "bits": 4}}')
    adapters.set_config(run.adapter, base_model_name_or_path=str(quantised))
    before = state(run.adapter)
    with pytest.raises(CheckpointError, match=r"quantised: is quantised \(awq\): .*name the model it was made from"):
        convert_pissa(run.adapter, init=run.init)
    assert state(run.adapter) == before
    convert_pissa(run.adapter, init=run.init, base=str(tiny))
    assert (adapters.logits_on(tiny, run.adapter) - run.logits).abs().max() < 1e-6
