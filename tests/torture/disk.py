"""A model of a disk under power: which of the changes that a step made are on it for certain, and which only perhaps.

A system call changes bytes of a file or names in folders. `fsync` of a file makes its bytes certain, `fsync` of a
folder its names; nothing else is certain, not even that what was done first lands first. This is less than ext4, xfs
or btrfs keep, so what holds here holds there, and on file systems that keep folders on different servers. Three things
are granted: a rename lands as a whole when it lands by itself, a name lands after the folder that holds it, and what
was there before the step is on the disk.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torture.image import Blob, Image, Node
from torture.trace import CHANGES, Call

# Rights, times and locks: not what is proven here.
_NO_CHANGE = {"flock", "chmod", "fchmod", "fchmodat", "chown", "fchown", "fchownat", "utimensat"}
_NO_CHANGE |= {"setxattr", "fsetxattr"}


@dataclass(eq=False)
class Inode:
    """A file, folder (`names`) or link (`target`), as it was before the step (`data`, `names`)."""

    number: int
    data: bytes = b""
    names: "dict[str, Inode] | None" = None
    target: str | None = None
    mtime_ns: int = 0


@dataclass(eq=False)
class Op:
    """One change: bytes or length of a file (`start`, `data`, or `size`), or a name of a folder (`name`, `child`)."""

    inode: Inode
    start: int = 0
    data: bytes | None = None
    size: int | None = None
    name: str | None = None
    child: Inode | None = None
    certain: bool = False
    other_half: "Op | None" = None
    after: "list[Op]" = field(default_factory=list)  # which land before this one


@dataclass
class Handle:
    """An open file of the step."""

    inode: Inode
    position: int = 0
    appends: bool = False


class Disk:
    """The changes of a step, call by call."""

    def __init__(self, image: Image, root: Path) -> None:
        self.root = os.fsencode(root)
        self.ops: list[Op] = []
        self._certain = 0  # how many of them
        self._numbers = iter(range(1 << 60, 1 << 61))
        self.top = Inode(0, names={})
        self._handles: dict[int, Handle] = {}
        by_number: dict[int, Inode] = {}
        self._live: dict[Inode, dict[str, Inode]] = {self.top: {}}
        self._bytes: dict[Inode, bytearray] = {}
        self._made: dict[Inode, Op] = {}  # the op that first names a folder
        for path, node in sorted(image.items()):
            folder, _, name = path.rpartition("/")
            inode = _inode(node, self._numbers, by_number)
            parent = self._find(folder.encode()) if folder else self.top
            assert parent is not None
            assert parent.names is not None
            parent.names[name] = self._live[parent][name] = inode
            if inode.names is not None:
                self._live[inode] = {}
            self._bytes[inode] = bytearray(inode.data)

    # The live tree, as the step sees it.

    def _find(self, path: bytes, start: Inode | None = None) -> Inode | None:
        at: Inode | None = start or self.top
        for part in filter(None, path.split(b"/")):
            at = self._live.get(at, {}).get(os.fsdecode(part)) if at else None
        return at

    def _place(self, fd: object, path: bytes) -> tuple[Inode, str] | None:
        """The folder and the name that a path argument means; None when it lies elsewhere."""
        if path.startswith(self.root + b"/"):
            start, path = self.top, path[len(self.root) + 1 :]
        elif isinstance(fd, int) and fd in self._handles and not path.startswith(b"/"):
            start = self._handles[fd].inode
        else:
            return None
        folder, _, name = path.rpartition(b"/")
        parent = self._find(folder, start)
        return (parent, os.fsdecode(name)) if parent in self._live else None

    def _record(self, op: Op) -> Op:
        if op.name is not None:
            slot = [each for each in self.ops if each.inode is op.inode and each.name == op.name]
            op.after += slot[-1:]
            if op.inode in self._made:
                op.after.append(self._made[op.inode])
        self.ops.append(op)
        return op

    def _set_name(self, folder: Inode, name: str, child: Inode | None) -> Op:
        if child is None:
            self._live[folder].pop(name, None)
        else:
            self._live[folder][name] = child
        op = self._record(Op(folder, name=name, child=child))
        if child is not None and child.names is not None:
            self._made.setdefault(child, op)
        return op

    def _new(self, folder: Inode, name: str, *, is_folder: bool = False, target: str | None = None) -> Inode:
        inode = Inode(next(self._numbers), names={} if is_folder else None, target=target)
        if is_folder:
            self._live[inode] = {}
        self._bytes[inode] = bytearray()
        self._set_name(folder, name, inode)
        return inode

    def _write(self, inode: Inode, start: int, data: bytes) -> None:
        live = self._bytes[inode]
        live.extend(bytes(max(0, start - len(live))))
        live[start : start + len(data)] = data
        self._record(Op(inode, start, data))

    def _resize(self, inode: Inode, size: int) -> None:
        live = self._bytes[inode]
        if len(live) == size:
            return
        del live[size:]
        live.extend(bytes(size - len(live)))
        self._record(Op(inode, size=size))

    # System calls.

    def do(self, call: Call) -> bool:
        """Take part in one call of the trace; whether it has changed what is on the disk, or how certainly."""
        before = len(self.ops), self._certain
        method = getattr(self, f"_do_{call.name}", None)
        if call.result >= 0 and method:
            method(*call.arguments, result=call.result)
        elif call.result >= 0 and call.inside and call.name in CHANGES and call.name not in _NO_CHANGE:
            raise AssertionError(f"{call.name} has no place in this model yet")
        return before != (len(self.ops), self._certain)

    def _do_openat(self, fd: object, path: bytes, flags: str, *_: object, result: int) -> None:
        self._handles.pop(result, None)
        place = self._place(fd, path)
        if place is None and path != self.root:
            return
        inode = self._live[place[0]].get(place[1]) if place else self.top
        if inode is not None and inode.target is not None:
            return self._do_openat(None, os.fsencode(inode.target).replace(b"{}", self.root), flags, result=result)
        if inode is None:
            assert "O_CREAT" in flags
            assert place
            inode = self._new(*place)
        elif "O_TRUNC" in flags:
            self._resize(inode, 0)
        self._handles[result] = Handle(inode, appends="O_APPEND" in flags)

    def _do_close(self, fd: int, *, result: int) -> None:
        self._handles.pop(fd, None)

    def _do_fcntl(self, fd: int, command: str, *_: object, result: int) -> None:
        if command.startswith("F_DUPFD") and fd in self._handles:
            self._handles[result] = self._handles[fd]

    def _do_lseek(self, fd: int, *_: object, result: int) -> None:
        if fd in self._handles:
            self._handles[fd].position = result

    def _do_read(self, fd: int, *_: object, result: int) -> None:
        if fd in self._handles:
            self._handles[fd].position += result

    def _do_write(self, fd: int, data: bytes, *_: object, result: int) -> None:
        if handle := self._handles.get(fd):
            start = len(self._bytes[handle.inode]) if handle.appends else handle.position
            self._write(handle.inode, start, data[:result])
            handle.position = start + result

    def _do_pwrite64(self, fd: int, data: bytes, size: int, start: int, *, result: int) -> None:
        if handle := self._handles.get(fd):
            self._write(handle.inode, start, data[:result])

    def _do_copy_file_range(self, source: int, start: int, fd: int, *_: object, result: int) -> None:
        handle = self._handles[fd]
        data = bytes(self._bytes[self._handles[source].inode][start : start + result])
        assert len(data) == result
        self._write(handle.inode, handle.position, data)
        handle.position += result

    def _do_sendfile(self, fd: int, source: int, start: int, *_: object, result: int) -> None:
        self._do_copy_file_range(source, start, fd, result=result)

    def _do_ftruncate(self, fd: int, size: int, *, result: int) -> None:
        if handle := self._handles.get(fd):
            self._resize(handle.inode, size)

    def _do_mkdir(self, path: bytes, *_: object, result: int) -> None:
        if place := self._place(None, path):
            self._new(*place, is_folder=True)

    def _do_unlink(self, path: bytes, *, result: int) -> None:
        if place := self._place(None, path):
            self._set_name(*place, None)

    _do_rmdir = _do_unlink

    def _do_unlinkat(self, fd: object, path: bytes, *_: object, result: int) -> None:
        if place := self._place(fd, path):
            self._set_name(*place, None)

    def _do_linkat(self, fd: object, path: bytes, to_fd: object, to: bytes, *_: object, result: int) -> None:
        source, target = self._place(fd, path), self._place(to_fd, to)
        assert source
        assert target
        self._set_name(*target, self._live[source[0]][source[1]])

    def _do_link(self, path: bytes, to: bytes, *, result: int) -> None:
        self._do_linkat(None, path, None, to, result=result)

    def _do_rename(self, path: bytes, to: bytes, *, result: int) -> None:
        source, target = self._place(None, path), self._place(None, to)
        assert source
        assert target
        inode = self._live[source[0]][source[1]]
        if self._live[target[0]].get(target[1]) is inode:
            return
        added = self._set_name(*target, inode)
        gone = self._set_name(*source, None)
        added.other_half, gone.other_half = gone, added

    def _do_fsync(self, fd: int, *, result: int) -> None:
        if handle := self._handles.get(fd):
            flushed = [op for op in self.ops if op.inode is handle.inode and not op.certain]
            self._certain += len(flushed)
            for op in flushed:
                op.certain = True

    _do_fdatasync = _do_fsync

    # What a power cut may leave.

    def remains(self) -> Iterator[Image]:
        """The trees that a power cut at this instant may leave, the likely and the nasty ones among all."""
        perhaps = [op for op in self.ops if not op.certain]
        everything = set(perhaps)
        yield self._tree(set())
        yield self._tree(everything)
        for op in perhaps:
            yield self._tree(_with_what_it_needs({op}))
            yield self._tree(everything - _with_what_needs_it({op}, perhaps))
            if op.data and len(op.data) > 1:
                yield self._tree(set(), torn=op)
                yield self._tree(everything - {op}, torn=op)
        for count in range(2, len(perhaps)):
            yield self._tree(_with_what_it_needs(set(perhaps[:count])))

    def _tree(self, landed: set[Op], torn: Op | None = None) -> Image:
        """The tree with what is certain and these; of the torn write, the first half."""
        names: dict[Inode, dict[str, Inode]] = {}
        data: dict[Inode, bytearray] = {}
        for op in self.ops:
            if not (op.certain or op in landed or op is torn):
                continue
            if op.name is not None:
                folder = names.setdefault(op.inode, dict(op.inode.names or {}))
                if op.child is None:
                    folder.pop(op.name, None)
                else:
                    folder[op.name] = op.child
            else:
                _change(data.setdefault(op.inode, bytearray(op.inode.data)), op, torn is op)
        image: Image = {}
        _walk(self.top, "", names, data, image)
        return image


def _inode(node: Node, numbers: Iterator[int], by_number: dict[int, Inode]) -> Inode:
    if isinstance(node, Blob):
        return by_number.setdefault(node.number, Inode(next(numbers), node.data, mtime_ns=node.mtime_ns))
    return Inode(next(numbers), target=node) if isinstance(node, str) else Inode(next(numbers), names={})


def _change(data: bytearray, op: Op, half: bool) -> None:
    if op.data is not None:
        written = op.data[: len(op.data) // 2] if half else op.data
        data.extend(bytes(max(0, op.start - len(data))))
        data[op.start : op.start + len(written)] = written
    else:
        assert op.size is not None
        del data[op.size :]
        data.extend(bytes(op.size - len(data)))


def _walk(
    folder: Inode, prefix: str, names: dict[Inode, dict[str, Inode]], data: dict[Inode, bytearray], image: Image
) -> None:
    for name, inode in names.get(folder, folder.names or {}).items():
        path = f"{prefix}{name}"
        if inode.target is not None:
            image[path] = inode.target
        elif inode.names is not None:
            image[path] = None
            _walk(inode, f"{path}/", names, data, image)
        else:
            image[path] = Blob(bytes(data.get(inode, inode.data)), inode.number, inode.mtime_ns)


def _needs(op: Op) -> Iterable[Op]:
    return (each for each in (*op.after, op.other_half) if each is not None and not each.certain)


def _with_what_it_needs(ops: set[Op]) -> set[Op]:
    found, waiting = set(ops), list(ops)
    while waiting:
        new = [each for each in _needs(waiting.pop()) if each not in found]
        found.update(new)
        waiting += new
    return found


def _with_what_needs_it(ops: set[Op], among: list[Op]) -> set[Op]:
    found = set(ops)
    while new := {op for op in among if op not in found and not found.isdisjoint(_needs(op))}:
        found |= new
    return found
