"""Actor and critic: one large file split into two models, against copying it."""

import json
import shutil
from functools import cache
from pathlib import Path

import llama
from measure import TOOLS, Benchmark, Command

# Layers of each of the two models for so many GB of both.
_LAYERS = {1: 3, 4: 17}


def split(folder: Path) -> Benchmark:
    """1 GB of random bytes."""
    return _against_copy(folder, 1)


def split_4_gb(folder: Path) -> Benchmark:
    """4 GB of random bytes, for the peak of memory."""
    return _against_copy(folder, 4)


def _against_copy(folder: Path, gigabytes: int) -> Benchmark:
    checkpoint, output = actor_critic(folder, gigabytes), folder / f"split-{gigabytes}"
    copy = checkpoint.with_suffix(".copy")
    return Benchmark(
        f"split-actor-critic, {gigabytes} GB",
        "cp model.safetensors, flushed",
        Command(
            [TOOLS, "split-actor-critic", checkpoint, "-o", output], lambda: shutil.rmtree(output, ignore_errors=True)
        ),
        Command(
            ["sh", "-c", 'cp "$0" "$1" && sync "$1"', checkpoint / "model.safetensors", copy],
            lambda: copy.unlink(missing_ok=True),
        ),
        lambda: _split_in(output, gigabytes),
    )


@cache
def actor_critic(folder: Path, gigabytes: int) -> Path:
    """A bf16 Llama and its critic of the same size as safetensors' save_model leaves them, in random bytes."""
    checkpoint = folder / f"actor-critic-{gigabytes}"
    checkpoint.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "pad_token_id": 0}
    (checkpoint / "config.json").write_text(json.dumps(config))
    backbone = list(llama.decoder(_LAYERS[gigabytes]))
    aliases = {f"value_model.model.{name}": f"critic_backbone.{name}" for name, _ in backbone}
    tensors = (
        *((f"critic_backbone.{name}", shape) for name, shape in backbone),
        ("policy.lm_head.weight", [llama.VOCABULARY, llama.HIDDEN]),
        *((f"policy.model.{name}", shape) for name, shape in backbone),
        ("value_model.score.weight", [1, llama.HIDDEN]),
    )
    header, nbytes = llama.header_of(((name, "BF16", shape) for name, shape in tensors), aliases)
    llama.fill(checkpoint / "model.safetensors", header, len(header) + nbytes)
    return checkpoint


def _split_in(output: Path, gigabytes: int) -> str:
    """Assert that each model has its own tensors under its own names."""
    decoder = {f"model.{name}" for name, _ in llama.decoder(_LAYERS[gigabytes])}
    for part, head in (("policy", "lm_head.weight"), ("critic", "score.weight")):
        with (output / part / "model.safetensors").open("rb") as file:
            fields = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        assert fields.keys() - {"__metadata__"} == decoder | {head}
    return "two models"
