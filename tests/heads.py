"""Tiny models with a value head in every place where trainers leave one."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HEAD = {
    "v_head.summary.weight": torch.linspace(-1, 1, 32).reshape(1, 32),
    "v_head.summary.bias": torch.tensor([0.25]),
}


def _copy(tiny: Path, path: Path) -> dict[str, torch.Tensor]:
    shutil.copytree(tiny, path)
    return load_file(path / "model.safetensors")


def flat(tiny: Path, path: Path, dtype: torch.dtype = torch.float32, prefix: str = "") -> Path:
    """One file; with a bf16 decoder the fp32 head lies at its start, else at its end."""
    decoder = {prefix + name: tensor.to(dtype) for name, tensor in _copy(tiny, path).items()}
    save_file(decoder | HEAD, path / "model.safetensors", metadata={"format": "pt", "origin": "a test"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
    return path


def prefixed(tiny: Path, path: Path) -> Path:
    """As a ZeRO-3 save of TRL's wrapper leaves it."""
    return flat(tiny, path, prefix="pretrained_model.")


def at_start(tiny: Path, path: Path) -> Path:
    """A bf16 decoder with TRL's fp32 head."""
    return flat(tiny, path, dtype=torch.bfloat16)


def at_start_prefixed(tiny: Path, path: Path) -> Path:
    """A bf16 decoder behind `pretrained_model.` with TRL's fp32 head."""
    return flat(tiny, path, dtype=torch.bfloat16, prefix="pretrained_model.")


def in_the_middle(tiny: Path, path: Path) -> Path:
    """A head that sorts between the tensors of the decoder, so that data has to move."""
    decoder = {("x_" if name == "lm_head.weight" else "") + name: t for name, t in _copy(tiny, path).items()}
    decoder["z.weight"] = decoder.pop("x_lm_head.weight")
    save_file(decoder | HEAD, path / "model.safetensors", metadata={"format": "pt"})
    return path


def sharded(tiny: Path, path: Path) -> Path:
    """Several shards with an index, the head in the last one."""
    tensors = _copy(tiny, path) | HEAD
    names = list(tensors)
    return _in_shards(path, tensors, [names[:8], names[8:16], names[16:]])


def head_in_a_shard_of_its_own(tiny: Path, path: Path) -> Path:
    """A shard that is empty without the head, so that those behind it get other numbers."""
    tensors = _copy(tiny, path) | HEAD
    names = [name for name in tensors if name not in HEAD]
    return _in_shards(path, tensors, [names[:8], list(HEAD), names[8:16], names[16:]])


def _in_shards(path: Path, tensors: dict[str, torch.Tensor], groups: list[list[str]]) -> Path:
    (path / "model.safetensors").unlink()
    files = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    for file, group in zip(files, groups, strict=True):
        save_file({name: tensors[name] for name in group}, path / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": {name: file for file, group in zip(files, groups, strict=True) for name in group},
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return path


def pickled(tiny: Path, path: Path) -> Path:
    """A `.bin` written by torch.save."""
    tensors = _copy(tiny, path)
    (path / "model.safetensors").unlink()
    torch.save(tensors | HEAD, path / "pytorch_model.bin")
    return path


def hard_linked(tiny: Path, path: Path) -> Path:
    """A file that somebody else holds too, as in a deduplicated store: it must not be edited where it lies."""
    flat(tiny, path)
    (path.parent / "elsewhere").hardlink_to(path / "model.safetensors")
    return path


def linked(tiny: Path, path: Path) -> Path:
    """A symbolic link to a blob, as in the hub's cache."""
    flat(tiny, path)
    (path / "model.safetensors").rename(path.parent / "blob")
    (path / "model.safetensors").symlink_to(path.parent / "blob")
    return path


LAYOUTS = {
    build.__name__: build
    for build in (
        *(flat, prefixed, at_start, at_start_prefixed, in_the_middle, sharded, head_in_a_shard_of_its_own, pickled),
        *(hard_linked, linked),
    )
}


def split(layout: str, tiny: Path, path: Path) -> Path:
    """One of these with its head in a file of its own, and no record of how it got there."""
    from tools.postprocess.fix_valuehead import fix_valuehead

    fix_valuehead(LAYOUTS[layout](tiny, path))
    shutil.rmtree(path / ".burnish")
    return path
