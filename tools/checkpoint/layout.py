"""Checkpoint: what a checkpoint directory is, read from names, JSON and headers alone."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tools.checkpoint import journal
from tools.checkpoint.errors import CheckpointError, all_of
from tools.checkpoint.header import Tensor, read_header
from tools.checkpoint.opening import open_file
from tools.checkpoint.pickles import read_bin

# In the order in which transformers and PEFT look for them.
MODEL_FILES = ("model.safetensors", "pytorch_model.bin")
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
HEAD_FILES = ("value_head.safetensors", "value_head.bin")

_MAX_JSON_BYTES = 100_000_000
_TOTALS = ("total_size", "total_parameters")

# What a loader of the tokenizer or of an image, video or audio processor reads.
PROCESSOR_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", "processor_config.json", "preprocessor_config.json"),
    *("video_preprocessor_config.json", "audio_tokenizer_config.json", "feature_extractor_config.json"),
)
# What only a resumed training reads; left out of every copy that is meant for use.
TRAINING_STATE = re.compile(
    r"optimizer(\.pt|\.bin|_\d+)?|scheduler\.pt|scaler\.pt|rng_state(_\d+)?\.pth|trainer_state\.json|latest"
    r"|global_step\d+|zero_to_fp32\.py|pytorch_model_fsdp_\d+|random_states_\d+\.pkl"
)


@dataclass(frozen=True)
class WeightFile:
    """One file of tensors. The offsets of its tensors are bytes from the start of the file."""

    path: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_safetensors(self) -> bool:
        return self.path.suffix == ".safetensors"


@dataclass(frozen=True)
class Weights:
    """The tensors that one loader reads together: a single file, or shards with their index."""

    name: str
    files: tuple[WeightFile, ...]
    index: Mapping[str, Any] | None = None

    @property
    def index_name(self) -> str:
        return f"{self.name}.index.json"

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        return {name: tensor for file in self.files for name, tensor in file.tensors.items()}

    def items(self) -> Iterator[tuple[WeightFile, str, Tensor]]:
        """Every tensor with the file that holds it, in the order of the files and of their data."""
        return ((file, name, tensor) for file in self.files for name, tensor in file.tensors.items())


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint directory as it lies on disk. No tensor was read."""

    path: Path
    config: Mapping[str, Any] | None
    adapter_config: Mapping[str, Any] | None
    model: Weights | None
    adapter: Weights | None
    head: Weights | None
    processor_files: tuple[str, ...]
    training_state: tuple[str, ...]
    recovered: str | None = None
    generation: int | None = None  # of the state that was read, see journal.generation

    @classmethod
    def open(cls, path: Path | str, *, accept_run: bool = False) -> "Checkpoint":
        """Finish an interrupted step if there is one, then read the directory.

        What it returns was there at one time: it is read again when a step ends meanwhile. Raises CheckpointBusy while
        another process applies one, and CheckpointError for a path that is missing, files that are damaged, and a
        directory that holds no checkpoint itself but a run of them (unless `accept_run`).
        """
        path = Path(path)
        try:
            if not path.exists():
                raise CheckpointError(path, "not found")
            if not path.is_dir():
                raise CheckpointError(path, "a file, not a checkpoint directory", f"try {path.parent}")
            checkpoint = cls._settled(path)
        except OSError as error:
            raise CheckpointError(error.filename or path, (error.strerror or str(error)).lower()) from error
        if checkpoint.kind == "run" and not accept_run:
            names = ", ".join(each.name for each in checkpoints_in(path))
            raise CheckpointError(path, f"a run directory with {names}", "name one, or add --checkpoint last, N or all")
        if checkpoint.kind == "nothing":
            problem = f"no checkpoint: neither {MODEL_FILES[0]}, {ADAPTER_FILES[0]} nor config.json is there"
            raise CheckpointError(path, problem)
        return checkpoint

    @classmethod
    def _settled(cls, path: Path) -> "Checkpoint":
        recovered = None
        while True:
            recovered = journal.recover(path) or recovered
            generation = journal.generation(path)
            try:
                checkpoint, problem = cls.read(path, recovered=recovered, generation=generation), None
            except (CheckpointError, OSError) as error:
                problem = error
            if generation is not None and generation == journal.generation(path):
                if problem:
                    raise problem
                return checkpoint

    @classmethod
    def read(cls, path: Path, *, recovered: str | None = None, generation: int | None = None) -> "Checkpoint":
        """Read the directory as it is, whatever it holds; `open` is the way in."""
        names = {entry.name for entry in path.iterdir()}
        config, adapter_config = (_read_object(path / n) for n in ("config.json", "adapter_config.json"))
        model, adapter, head = (_find_weights(path, names, g) for g in (MODEL_FILES, ADAPTER_FILES, HEAD_FILES))
        if adapter_config is not None and adapter is None and model is None:
            raise CheckpointError(path, f"adapter_config.json but no {ADAPTER_FILES[0]}", "was the save cut short?")
        return cls(
            path,
            config,
            adapter_config,
            model,
            adapter,
            head,
            processor_files=tuple(name for name in PROCESSOR_FILES if name in names),
            training_state=tuple(sorted(filter(TRAINING_STATE.fullmatch, names))),
            recovered=recovered,
            generation=generation,
        )

    @property
    def weights(self) -> tuple[Weights, ...]:
        """All weights of the directory: model, adapter, head, as far as present."""
        return tuple(weights for weights in (self.model, self.adapter, self.head) if weights)

    @property
    def kind(self) -> str:
        """`adapter`, `model`, `value head` (nothing else was saved), `config`, `run` (of others) or `nothing`."""
        found = {
            "adapter": self.adapter_config is not None or self.adapter,
            "model": self.model,
            "value head": self.head,
            "config": self.config is not None,
            "run": checkpoints_in(self.path),
        }
        return next((kind for kind, is_there in found.items() if is_there), "nothing")

    @property
    def is_training_state(self) -> bool:
        """Whether training can go on from here: an optimizer is there, and the weights must stay as it left them."""
        return any(name.startswith(("optimizer", "global_step")) for name in self.training_state)

    def read_json(self, name: str) -> Any:
        """The parsed content of a JSON file of this directory, None when it is not there."""
        return _read_json(self.path / name)


def checkpoints_in(run: Path) -> tuple[Path, ...]:
    """The `checkpoint-N` directories of a run, by number."""
    found = [(int(m[1]), p) for p in run.iterdir() if (m := re.fullmatch(r"checkpoint-(\d+)", p.name)) and p.is_dir()]
    return tuple(path for _, path in sorted(found))


def _find_weights(path: Path, names: set[str], candidates: tuple[str, ...]) -> Weights | None:
    for name in candidates:
        single, index = name in names, f"{name}.index.json" in names
        if single and index:
            raise CheckpointError(
                path, f"both {name} and {name}.index.json are here, and loaders disagree on which counts", "remove one"
            )
        if single:
            return Weights(name, (read_weight_file(path / name),))
        if index:
            return _read_sharded(path, names, name)
    return None


def read_weight_file(path: Path) -> WeightFile:
    """The names, dtypes, shapes and byte ranges of one `.safetensors` or `.bin` file."""
    if path.suffix == ".bin":
        return WeightFile(path, read_bin(path), {})
    header = read_header(path)
    shift = header.data_start
    tensors = {n: Tensor(t.dtype, t.shape, t.start + shift, t.end + shift) for n, t in header.tensors.items()}
    return WeightFile(path, tensors, header.metadata)


def _read_sharded(path: Path, names: set[str], name: str) -> Weights:
    index_path = path / f"{name}.index.json"
    index = _read_object(index_path) or {}
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(index_path, "no weight_map from tensor names to file names", "save the checkpoint again")
    metadata = index.get("metadata") or {}
    if not isinstance(metadata, dict) or not all(type(metadata.get(total, 0)) in (int, float) for total in _TOTALS):
        raise CheckpointError(index_path, "its metadata is not a map with numbers in it", "save the checkpoint again")
    shards: list[WeightFile] = []
    errors: list[CheckpointError] = []
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or shard in ("", ".."):
            raise CheckpointError(index_path, f"names {shard}, which is not a plain file name")
        if shard not in names:
            errors.append(CheckpointError(index_path, f"names {shard}, which is not there", "the save was cut short"))
            continue
        try:
            shards.append(read_weight_file(path / shard))
        except CheckpointError as error:
            errors.append(error)
    if errors:
        raise all_of(errors)
    held = {tensor: file.name for file in shards for tensor in file.tensors}
    for tensor in sorted(weight_map.keys() | held.keys()):
        if weight_map.get(tensor) != held.get(tensor):
            problem = f"says {tensor} is in {weight_map.get(tensor)}, but it is in {held.get(tensor)}"
            errors.append(CheckpointError(index_path, problem, "the save was cut short, or mixed with another"))
    if errors:
        raise all_of(errors[:5])
    return Weights(name, tuple(shards), index)


def _read_object(path: Path) -> Mapping[str, Any] | None:
    value = _read_json(path)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(path, "not a JSON object", "was the save cut short?")
    return value


def _read_json(path: Path) -> Any:
    if not os.path.lexists(path):
        return None
    with open_file(path) as (file, size):
        if size > _MAX_JSON_BYTES:
            raise CheckpointError(path, f"{size} bytes, too long for a JSON file of a checkpoint")
        raw = file.read(_MAX_JSON_BYTES)
    try:
        value = json.loads(raw.decode("utf-8"))
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair can be read, but never written again
        return value
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"not valid JSON ({error})", "was the save cut short?") from error
