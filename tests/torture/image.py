"""Image: a directory tree as a value, so that it can be laid out, compared and simulated."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

RECORDS = ".burnish"


@dataclass(frozen=True)
class Blob:
    """A regular file: its bytes, a number that two names of one file (a hard link) share, and when it was written."""

    data: bytes
    number: int
    mtime_ns: int = 0


# A folder is None, a symbolic link its target.
Node = Blob | str | None
Image = dict[str, Node]


def read_image(root: Path) -> Image:
    """Everything under `root` by relative path; in the target of a link `{}` stands for `root`: the tree can move."""
    image: Image = {}
    for folder, folders, files in os.walk(root):
        for name in sorted(folders + files):
            path = Path(folder) / name
            relative = path.relative_to(root).as_posix()
            if path.is_symlink():
                image[relative] = str(path.readlink()).replace(str(root), "{}")
            elif path.is_dir():
                image[relative] = None
            else:
                image[relative] = Blob(path.read_bytes(), path.stat().st_ino, path.stat().st_mtime_ns)
    return dict(sorted(image.items()))


def write_image(image: Image, root: Path) -> None:
    """Make `root` exactly this tree."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    first: dict[int, Path] = {}
    for relative, node in sorted(image.items()):
        path = root / relative
        if node is None:
            path.mkdir()
        elif isinstance(node, str):
            path.symlink_to(node.replace("{}", str(root)))
        elif node.number in first:
            path.hardlink_to(first[node.number])
        else:
            path.write_bytes(node.data)
            os.utime(path, ns=(node.mtime_ns, node.mtime_ns))
            first[node.number] = path


def visible(image: Image) -> dict[str, bytes | str]:
    """What users see: files and links by path, without the records of steps and without what is still being built."""
    return {
        path: node.data if isinstance(node, Blob) else node
        for path, node in image.items()
        if node is not None and not any(_is_hidden(part) for part in path.split("/"))
    }


def _is_hidden(part: str) -> bool:
    return part == RECORDS or part.endswith((".burnish-partial", ".burnish-old"))


def under(image: Image, folder: str) -> Image:
    """The part of an image inside `folder`, by paths from there."""
    return {path.removeprefix(f"{folder}/"): node for path, node in image.items() if path.startswith(f"{folder}/")}
