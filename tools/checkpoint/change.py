"""Change: the files a step wants, as values. Nothing here touches the disk."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.files import same_range
from tools.checkpoint.header import Tensor, build_header
from tools.checkpoint.layout import Checkpoint, WeightFile, Weights


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies in a file; it is moved as bytes, never decoded."""

    file: WeightFile
    name: str

    @property
    def tensor(self) -> Tensor:
        return self.file.tensors[self.name]

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    @property
    def sources(self) -> tuple["Stored", ...]:
        """What it is read from, as of a computed tensor: itself."""
        return (self,)

    def read(self) -> bytes:
        with self.file.path.open("rb") as file:
            file.seek(self.tensor.start)
            return file.read(self.nbytes)


@dataclass(frozen=True)
class Computed:
    """A tensor that `blocks` computes from stored ones when it is written: little-endian bytes, C order, in pieces.

    `apart`: it may be computed in another process, since it leaves nothing behind that this one needs.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    blocks: Callable[[], Iterable[bytes]]
    sources: tuple[Stored, ...]
    apart: bool = False

    def read(self) -> bytes:
        return b"".join(self.blocks())


Source = Stored | Computed


@dataclass(frozen=True)
class TensorFile:
    """A `.safetensors` or `.bin` file with these tensors, in this order."""

    tensors: Mapping[str, Source]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for source in self.tensors.values())

    def header(self, length: int | None = None) -> bytes:
        """The safetensors header of this file, `{"format": "pt"}` added to the metadata that is there."""
        rows = ((name, s.dtype, s.shape, s.nbytes) for name, s in self.tensors.items())
        return build_header(rows, {"format": "pt", **self.metadata}, length)


@dataclass(frozen=True)
class TextFile:
    """A small file with this text."""

    text: str

    @property
    def nbytes(self) -> int:
        return len(self.text.encode())


@dataclass(frozen=True)
class FileCopy:
    """A byte-for-byte copy of another file; in place it is a new name for one of the checkpoint's own that goes."""

    source: Path

    @property
    def nbytes(self) -> int:
        return self.source.stat().st_size


Content = TensorFile | TextFile | FileCopy


@dataclass(frozen=True)
class Change:
    """What a step wants of a checkpoint: each named file as it shall be, `None` for a file that goes.

    No files: nothing to do. `dropped` names the tensors that the step gives up on purpose; every other tensor of a
    touched file must come back somewhere, or `check` refuses. `accept` is called when all files are written and none
    has taken its place yet; it raises CheckpointError for a result that nobody wants. `recorded` is what the receipt
    keeps beside the options: what the result came from, where no option says it.
    """

    summary: str
    files: Mapping[str, Content | None] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    accept: Callable[[], None] = lambda: None
    recorded: Mapping[str, Any] = field(default_factory=dict)

    def check(self, checkpoint: Checkpoint) -> None:
        """Assert that no tensor of the touched files is lost and no name is written twice in one set of weights."""
        kept = {(s.file.path, s.name) for s in self._sources()}
        copied = {content.source for content in self.files.values() if isinstance(content, FileCopy)}
        for weights in checkpoint.weights:
            for file, name, _ in weights.items():
                is_kept = file.name not in self.files or file.path in copied or (file.path, name) in kept
                if not is_kept and name not in self.dropped:
                    raise AssertionError(f"{file.path}: {name} would be lost")

    def inputs(self) -> set[Path]:
        """Every file that is read to write the wanted ones."""
        copied = {content.source for content in self.files.values() if isinstance(content, FileCopy)}
        return copied | {source.file.path for source in self._sources()}

    def _sources(self) -> Iterable[Stored]:
        for content in self.files.values():
            if isinstance(content, TensorFile):
                for source in content.tensors.values():
                    yield from source.sources


def stored(weights: Weights) -> dict[str, Stored]:
    """Every tensor of these weights as a source, by its present name."""
    return {name: Stored(file, name) for file, name, _ in weights.items()}


def same_bytes(one: Source, other: Source) -> bool:
    """Whether two tensors agree in dtype, shape and every byte."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if not (isinstance(one, Stored) and isinstance(other, Stored)):
        return one.read() == other.read()
    places = (one.file.path, one.tensor.start), (other.file.path, other.tensor.start)
    return places[0] == places[1] or same_range(*places[0], *places[1], one.nbytes)


def refuse_ungathered(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError when a tensor has no elements: what ZeRO-3 writes for a parameter it did not gather."""
    for weights in checkpoint.weights:
        for file, name, tensor in weights.items():
            if tensor.elements == 0:
                raise CheckpointError(
                    file.path,
                    f"{name} has 0 elements: looks like an un-gathered ZeRO-3 parameter",
                    "save again with stage3_gather_16bit_weights_on_model_save, or consolidate the ZeRO checkpoint",
                )


def renamed(
    weights: Weights, names: Mapping[str, str | None], file_name: Callable[[str], str] = str
) -> dict[str, Content | None]:
    """The files and the index of `weights` after tensors got new names or (None) left; untouched shards stay out.

    A shard that loses its last tensor goes, and the others are numbered anew. `total_size` and `total_parameters` of
    the index follow. `file_name` gives files and index other names.
    """
    files: dict[str, Content | None] = {}
    shards: dict[str, Mapping[str, Source]] = {}
    numbered = _numbered(weights, names)
    for file in weights.files:
        new = {n: Stored(file, old) for old in file.tensors if (n := names.get(old, old)) is not None}
        target = file_name(numbered.get(file.name, file.name))
        if target in shards:
            raise CheckpointError(file.path, "another shard would get its name as safetensors", "rename one of the two")
        shards |= {target: new} if new else {}
        is_touched = list(new) != list(file.tensors)
        if target != file.name or is_touched:
            is_same = not is_touched and Path(target).suffix == file.path.suffix
            content = FileCopy(file.path) if is_same else TensorFile(new, file.metadata)
            files |= {file.name: None, **({target: content} if new else {})}
    if files and weights.index is not None:
        files |= {weights.index_name: None}
        files |= {file_name(weights.index_name): index_file(shards, weights)} if shards else {}
    return files


def _numbered(weights: Weights, names: Mapping[str, str | None]) -> dict[str, str]:
    """New names for the shards `NAME-00001-of-00004.safetensors` that are left, once one of them is empty."""
    left = [file.name for file in weights.files if any(names.get(n, n) is not None for n in file.tensors)]
    if len(left) == len(weights.files):
        return {}
    return {n: re.sub(r"-\d+-of-\d+", f"-{i:05}-of-{len(left):05}", n) for i, n in enumerate(left, start=1)}


def index_file(shards: Mapping[str, Mapping[str, Source]], weights: Weights | None = None) -> TextFile:
    """The index of these shards, file name -> tensor name -> tensor.

    With `weights` it takes the place of their index: its other fields stay, and of `total_size` (bytes) and
    `total_parameters` (elements) those that are there change by what the tensors do.
    """
    index = dict(weights.index or {}) if weights else {}
    metadata = dict(index.get("metadata") or {})
    before: list[Tensor] = list(weights.tensors.values()) if weights else []
    now = [source for tensors in shards.values() for source in tensors.values()]
    totals = {
        "total_parameters": sum(math.prod(s.shape) for s in now) - sum(t.elements for t in before),
        "total_size": sum(s.nbytes for s in now) - sum(t.nbytes for t in before),
    }
    metadata |= {key: metadata.get(key, 0) + more for key, more in totals.items() if key in metadata or not index}
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    return json_file({**index, "metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})


def json_file(value: Any) -> TextFile:
    """A JSON file as transformers writes its own: indented by two, a newline at the end."""
    return TextFile(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
