"""merge-adapter on wrong bases, wrong adapters and wrong directories: refused by name, nothing written."""

import json
import shutil
from pathlib import Path
from typing import Any

import merging
import pytest
from safetensors.torch import load_file, save_file
from snapshots import contents
from typer.testing import CliRunner

from tools.checkpoint.errors import CheckpointError
from tools.cli import app
from tools.postprocess.merge_adapter import merge_adapter


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return merging.model(tmp_path / "base")


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    merging.adapter(base, tmp_path / "adapter")
    return tmp_path / "adapter"


def test_mg_07_no_module_matches(base: Path, adapter: Path, tmp_path: Path) -> None:
    merging.rewritten(
        adapter, lambda held: {n.replace("model.layers", "model.language_model.layers"): t for n, t in held.items()}
    )
    expected = r"0 of 4 adapter modules matched .*: it has no model.language_model.layers.0.self_attn.q_proj.weight, "
    with pytest.raises(CheckpointError, match=expected + r"nearest is model.layers.0.self_attn.q_proj.weight"):
        merge_adapter(adapter, base=str(base), output=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("factor", [0, 1e-30], ids=["zero", "rounded away"])
def test_mg_07_a_result_equal_to_the_base_is_refused(factor: float, base: Path, adapter: Path, tmp_path: Path) -> None:
    merging.rewritten(adapter, lambda held: {n: t * factor if "lora_B" in n else t for n, t in held.items()})
    with pytest.raises(CheckpointError, match="changes nothing: every number of the base is the same"):
        merge_adapter(adapter, base=str(base), output=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("first", ["model.layers", "layers", "model.model.layers"])
def test_names_with_and_without_the_prefix_of_the_base(first: str, base: Path, adapter: Path, tmp_path: Path) -> None:
    """As from a training of the model without its output matrix, or under one more module."""
    expected = contents(merging.alone(adapter, base))["model.safetensors"]
    merging.rewritten(
        adapter, lambda held: {n.replace("model.model.layers", f"model.{first}"): t for n, t in held.items()}
    )
    merge_adapter(adapter, base=str(base), output=tmp_path / "merged")
    assert contents(tmp_path / "merged")["model.safetensors"] == expected


def test_mg_09_a_quantised_base_is_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "packed")
    merging.edit(
        tmp_path / "packed/config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}
    )
    expected = r"quantised \(bitsandbytes, 4 bits\): .*; give the 16-bit base it was made from with --base"
    with pytest.raises(CheckpointError, match=expected):
        merge_adapter(adapter, base=str(tmp_path / "packed"), output=tmp_path / "merged")
    merging.edit(adapter / "adapter_config.json", base_model_name_or_path=str(tmp_path / "packed"))
    report = merge_adapter(adapter, base=str(base), output=tmp_path / "merged")
    assert "trained on" in report.details["note"]
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())


def test_mg_12_a_run_or_a_typo_never_asks_the_network(base: Path, adapter: Path, tmp_path: Path) -> None:
    for number in (200, 400):
        shutil.copytree(adapter, tmp_path / f"run/checkpoint-{number}")
    with pytest.raises(
        CheckpointError, match="a run directory with checkpoint-200, checkpoint-400; name one, or add --checkpoint"
    ):
        merge_adapter(tmp_path / "run", base=str(base), output=tmp_path / "merged")
    with pytest.raises(CheckpointError, match="not found"):
        merge_adapter(tmp_path / "tpyo", base=str(base), output=tmp_path / "merged")
    with pytest.raises(CheckpointError, match="not found"):
        merge_adapter(adapter, base=str(tmp_path / "tpyo"), output=tmp_path / "merged")
    done = CliRunner().invoke(
        app,
        ["merge-adapter", f"{tmp_path}/run", "--base", f"{base}", "-o", f"{tmp_path}/merged", "--checkpoint", "last"],
    )
    assert done.exit_code == 0, done.output
    assert (tmp_path / "merged/model.safetensors").is_file()


def test_mg_13_a_full_model_is_no_adapter(base: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a full model, not an adapter; nothing to merge; use it directly"):
        merge_adapter(base, base=str(base), output=tmp_path / "merged")


def test_an_adapter_of_a_changed_base_names_the_command(base: Path, adapter: Path, tmp_path: Path) -> None:
    merging.edit(adapter / "adapter_config.json", init_lora_weights="pissa_niter_4")
    with pytest.raises(CheckpointError, match=r"a pissa_niter_4 adapter: .*; first run: tools convert-pissa"):
        merge_adapter(adapter, base=str(base), output=tmp_path / "merged")


def test_fi_13_an_empty_adapter_is_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    whole = load_file(adapter / "adapter_model.safetensors")
    for held, problem in (({}, "holds no tensor"), ({n: t[:0] for n, t in whole.items()}, "has 0 elements")):
        save_file(held, adapter / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match=problem):
            merge_adapter(adapter, base=str(base), output=tmp_path / "merged")


def test_numbers_that_are_none_are_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    merging.rewritten(adapter, lambda held: {n: t / 0 if "lora_A" in n else t for n, t in held.items()})
    with pytest.raises(CheckpointError, match=r"lora_A.weight holds NaN or infinity; the training had diverged"):
        merge_adapter(adapter, base=str(base), output=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_bias_of_lora_needs_one_in_the_base(base: Path, tmp_path: Path) -> None:
    merging.adapter(base, tmp_path / "biased", lora_bias=True)
    expected = r"has biases of its own \(lora_bias\), and .* has no model.layers.0.self_attn.q_proj.bias"
    with pytest.raises(CheckpointError, match=expected):
        merge_adapter(tmp_path / "biased", base=str(base), output=tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("option", [{"weight": float("nan")}, {"more": ["adapter=inf"]}], ids=["--weight", "--with"])
def test_a_weight_that_is_no_number_is_refused(
    option: dict[str, Any], base: Path, adapter: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"(nan|inf) is not a finite weight"):
        merge_adapter(adapter, base=str(base), output=tmp_path / "merged", **option)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("quantization_config", "x", r"quantised \(method unknown\)"),
        ("text_config", [1], r"config.json: text_config is \[1\], not an object"),
        ("model_type", ["x"], r"config.json: model_type is \['x'\], not a name"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(
    field: str, value: Any, problem: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    merging.edit(base / "config.json", **{field: value})
    with pytest.raises(CheckpointError, match=problem):
        merge_adapter(adapter, base=str(base), output=tmp_path / "merged")


def test_an_adapter_begun_by_loftq_carries_a_note(base: Path, adapter: Path, tmp_path: Path) -> None:
    merging.edit(adapter / "adapter_config.json", init_lora_weights="loftq")
    report = merge_adapter(adapter, base=str(base), output=tmp_path / "merged")
    assert report.details["note"].startswith("a loftq adapter belongs on the quantised weights it began with; is ")
