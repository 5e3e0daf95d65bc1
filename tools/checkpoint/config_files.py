"""The config of a model whose trainer saved none: copied from where somebody says, never made up."""

from collections.abc import Iterable
from pathlib import Path

from tools.checkpoint.change import FileCopy
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import Checkpoint

_NEEDED, _OPTIONAL = "config.json", "generation_config.json"


def missing_config(source: Checkpoint, given: Path | None) -> dict[str, FileCopy]:
    """config.json and generation_config.json as far as `source` lacks them and `given` has them.

    Without `given`, of the base that adapter_config.json names, where that is a directory. Raises CheckpointError when
    `given` has no config.json.
    """
    if given is not None and not (given / _NEEDED).is_file():
        raise CheckpointError(given, f"has no {_NEEDED}", "name the directory of the base model")
    folder = given or _named_base(source)
    files: Iterable[str] = (_NEEDED, _OPTIONAL) if folder else ()
    return {
        name: FileCopy(folder / name)
        for name in files
        if folder and not (source.path / name).exists() and (folder / name).is_file()
    }


def _named_base(source: Checkpoint) -> Path | None:
    named = (source.adapter_config or {}).get("base_model_name_or_path")
    return Path(named) if isinstance(named, str) and (Path(named) / _NEEDED).is_file() else None
