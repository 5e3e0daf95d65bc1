"""Models made of several: square layers are merged and extracted in the orientation of the part they belong to."""

from pathlib import Path

import merging
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

from tools.checkpoint.errors import CheckpointError
from tools.postprocess.extract_adapter import extract_adapter
from tools.postprocess.merge_adapter import merge_adapter

PIXELS = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """ViT and GPT-2, both with square layers; those of GPT-2 are stored as [in, out]."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 8}
    encoder = ViTConfig(hidden_size=32, patch_size=4, **sizes)
    decoder = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=32)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    VisionEncoderDecoderModel(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(pixel_values=PIXELS, decoder_input_ids=merging.IDS).logits
    return found


def trained(base: Path, folder: Path) -> torch.Tensor:
    loaded = VisionEncoderDecoderModel.from_pretrained(base)
    options = {"target_modules": ["c_proj"], "fan_in_fan_out": True}
    wrapped = get_peft_model(loaded, LoraConfig(r=4, init_lora_weights=False, **options))
    wrapped.save_pretrained(folder)
    return logits(wrapped)


def test_a_part_is_merged_in_its_own_orientation(base: Path, tmp_path: Path) -> None:
    expected = trained(base, tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "merged")
    assert (logits(VisionEncoderDecoderModel.from_pretrained(tmp_path / "merged")) - expected).abs().max() < 1e-5


def test_a_part_is_extracted_in_its_own_orientation(base: Path, tmp_path: Path) -> None:
    tuned = VisionEncoderDecoderModel.from_pretrained(base)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if name.endswith("c_proj.weight"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    tuned.save_pretrained(tmp_path / "tuned")
    extract_adapter(tmp_path / "tuned", base=str(base), rank=32, output=tmp_path / "adapter")
    wrapped = PeftModel.from_pretrained(VisionEncoderDecoderModel.from_pretrained(base), tmp_path / "adapter")
    assert (logits(wrapped) - logits(tuned)).abs().max() < 1e-5


def test_a_square_layer_of_no_known_part_is_refused(base: Path, tmp_path: Path) -> None:
    trained(base, tmp_path / "adapter")
    text = (base / "config.json").read_text()
    (base / "config.json").write_text(text.replace('"decoder":', '"text_config":'))
    with pytest.raises(CheckpointError, match=r"c_proj.weight is square, and config.json does not say whether"):
        merge_adapter(tmp_path / "adapter", base=str(base), output=tmp_path / "merged")
