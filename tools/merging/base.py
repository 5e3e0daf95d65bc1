"""The base of a merge: an unquantised model in a directory of its own, and the files that come from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.checkpoint.change import Stored, refuse_ungathered, stored
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import PROCESSOR_FILES, TRAINING_STATE, Checkpoint, Weights
from tools.hub import local_copy
from tools.lora.adapters import EMBEDDINGS, OUTPUT_MATRICES

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".npz"}
_IMAGE_OR_SOUND = ("processor", "extractor", "audio")


@dataclass(frozen=True)
class Base:
    """A model that adapters are merged into. `tensors` are its weights by name, in the order of files and data."""

    checkpoint: Checkpoint
    weights: Weights
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def embedding(self) -> str | None:
        """The name of the token embedding, None where there is none that is known."""
        return next((name for name in self.tensors if name.endswith(tuple(f"{e}.weight" for e in EMBEDDINGS))), None)

    @property
    def head(self) -> str | None:
        """The name of the output matrix in the files; None where they hold none, since it is tied to the embedding."""
        return next((name for name in self.tensors if is_head(name)), None)


def is_head(name: str) -> bool:
    """Whether a tensor of this name turns hidden states into logits."""
    return name.removesuffix(".weight").rpartition(".")[2] in OUTPUT_MATRICES and name.endswith(".weight")


def open_base(adapter: Checkpoint, named: Path | str | None) -> Base:
    """The model at `named`, or the one that the adapter names when that lies on this machine.

    Raises CheckpointError for a base that is not here, is an adapter itself, or is quantised.
    """
    return as_base(Checkpoint.open(_locate(adapter, named)))


def as_base(checkpoint: Checkpoint) -> Base:
    """The model of a directory; raises CheckpointError when it holds no whole, unquantised one."""
    path = checkpoint.path
    if checkpoint.adapter_config is not None:
        raise CheckpointError(path, "an adapter, not a whole model", "name the model that it was trained on")
    if checkpoint.model is None or checkpoint.config is None:
        missing = "config.json" if checkpoint.model else "weights"
        raise CheckpointError(path, f"holds no {missing}", "name a whole model")
    _refuse_odd_values(checkpoint)
    _refuse_quantised(checkpoint)
    refuse_ungathered(checkpoint)
    return Base(checkpoint, checkpoint.model, checkpoint.config, stored(checkpoint.model))


def _locate(adapter: Checkpoint, named: Path | str | None) -> Path:
    wanted = named or (adapter.adapter_config or {}).get("base_model_name_or_path")
    if not wanted:
        raise CheckpointError(adapter.path, "does not name its base model", "name it with --base")
    found = local_copy(wanted)
    if found is None and named:
        raise CheckpointError(named, "not found")
    if found is None:
        problem = f"trained on {wanted}, which is neither a directory here nor in the hub's cache"
        raise CheckpointError(adapter.path, problem, "name a local copy with --base")
    return found


def _refuse_odd_values(checkpoint: Checkpoint) -> None:
    config = checkpoint.config or {}
    for field, kind, what in (("model_type", str, "a name"), ("text_config", dict, "an object")):
        if not isinstance(value := config.get(field), kind | None):
            problem = f"{field} is {value!r}, not {what}"
            raise CheckpointError(checkpoint.path / "config.json", problem, "copy it from the original model")


def _refuse_quantised(checkpoint: Checkpoint) -> None:
    method = quantisation(checkpoint.config or {})
    if method:
        problem = f"quantised ({method}): a change added to packed numbers would be rounded away"
        raise CheckpointError(checkpoint.path, problem, "give the 16-bit base it was made from with --base")


def quantisation(config: Mapping[str, Any]) -> str | None:
    """The method by which a model of this config.json is quantised, None when it is not."""
    text = config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, dict) else None
    found = config.get("quantization_config") or nested
    if not found:
        return None
    if not isinstance(found, dict):
        return "method unknown"
    method = str(found.get("quant_method") or "method unknown")
    bits = next((f", {n} bits" for n in (4, 8) if found.get(f"load_in_{n}bit") or found.get("bits") == n), "")
    return method + bits


def files_from(base: Checkpoint, adapter: Checkpoint) -> tuple[list[str], list[str]]:
    """The names of the files that a merged model takes from its base, and of what stays behind there.

    Taken: all that is no weight, training state, record or model card, and that the adapter has no part of. When the
    adapter has a tokenizer of its own, all files of that are the adapter's, and so for its processor.
    """
    own = {_group(name) for name in adapter.processor_files}
    taken, left = [], []
    for entry in sorted(base.path.iterdir()):
        name = entry.name
        if name.startswith(".") or TRAINING_STATE.fullmatch(name) or name == "training_args.bin":
            continue
        if (
            not entry.is_file()
            or entry.suffix in _WEIGHT_SUFFIXES
            or name.endswith(".index.json")
            or name == "README.md"
        ):
            left.append(name)
        elif (adapter.path / name).exists():  # the adapter's own
            continue
        elif name != "config.json" and not (name in PROCESSOR_FILES and _group(name) in own):
            taken.append(name)
    weights = {file.name for file in base.model.files} | {base.model.index_name} if base.model else set()
    return taken, [name for name in left if name not in weights]


def _group(name: str) -> str:
    return "processor" if any(word in name for word in _IMAGE_OR_SOUND) else "tokenizer"
