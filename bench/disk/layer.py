"""A fault layer under the file system, as Python sees it: the n-th call below a folder fails, is torn, or is the last.

    with DiskLayer(folder, Fault("full", 17)) as layer: ...

Calls of ``os``, ``io.open`` (and with it ``Path.open`` and torch's checkpoint writer) and ``fcntl.flock`` are counted
where they are about something in the folder; all others pass. Files keep Python's own buffers above the layer, so that
an error comes when the buffer is flushed, as it would from a disk.
"""

import builtins
import errno
import fcntl
import io
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias, get_args

Kind: TypeAlias = Literal["full", "read-only", "error", "torn", "death", "slow"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""What can happen at the n-th call:

full        half of a write is taken; from here on whatever needs room fails with ENOSPC
read-only   from here on whatever changes something fails with EROFS
error       this call does nothing and fails with EIO
torn        this call fails with EIO although it was done; of a write, half of it
death       the process ends before this call, in the middle of a write; as SIGKILL would end it
slow        this call and all that follow take a while
"""
KILLED = 137
"""Exit status of a process that the layer has ended."""
SLOW_S = 0.02

ALLOCATES = frozenset({"create", "write", "mkdir", "link", "fsync"})
"""Calls that need room on the disk."""
CHANGES = frozenset({"create", "open to write", "write", "mkdir", "link", "rename", "unlink", "rmdir", "truncate"})
"""Calls that a read-only file system refuses."""


class Fault(NamedTuple):
    """What happens, and at which call, from 1 on."""

    kind: Kind
    at: int


@dataclass(frozen=True, slots=True)
class Call:
    """One call that reached the layer."""

    kind: str
    """``create``, ``open to write``, ``open to read``, ``write``, ``read``, ``fsync``, ``close``, ``rename``, ..."""
    path: str
    """Relative to the folder."""


def is_hit(fault: Kind, call: str) -> bool:
    """Whether such a fault does anything to such a call."""
    if fault in ("full", "read-only"):
        return call in (ALLOCATES if fault == "full" else CHANGES)
    return not (fault == "torn" and call in ("read", "open to read", "lock", "list"))  # the same as an error


class DiskLayer:
    """The layer, while it is open. Without a fault it only counts."""

    def __init__(self, root: Path, fault: Fault | None = None, *, told: Callable[[Call], None] = lambda call: None):
        """``told`` gets the call that is hit, just before."""
        self.calls: list[Call] = []
        self._root = os.path.realpath(root)
        self.fault = fault
        """What happens; it may be set while the layer is open."""
        self._told = told
        self._lock = threading.Lock()
        self._paths: dict[int, str] = {}
        """What is open, of what ``os.open`` has opened in the folder."""
        self._real: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        for module, name, patched in self._patches():
            self._real.append((module, name, getattr(module, name)))
            setattr(module, name, patched)
        return self

    def __exit__(self, *_: object) -> None:
        while self._real:
            setattr(*self._real.pop())

    def strike(self, kind: Kind) -> None:
        """Let it happen at the next call."""
        self.fault = Fault(kind, len(self.calls) + 1)

    # What happens to a call.

    def meets(self, kind: str, path: str, done: Callable[[], Any], torn: Callable[[], Any] | None = None) -> Any:
        """Count a call, and do it or not. ``torn`` does half of it, where there is such a half."""
        call = Call(kind, os.path.relpath(path, self._root))
        with self._lock:
            self.calls.append(call)
            number = len(self.calls)
        fault = self.fault
        if fault is None or number < fault.at:
            return done()
        if number == fault.at:
            self._told(call)
        return self._faulty(fault, number == fault.at, call, done, torn)

    def _faulty(
        self, fault: Fault, is_first: bool, call: Call, done: Callable[[], Any], torn: Callable[[], Any] | None
    ) -> Any:
        match fault.kind:
            case "slow":
                time.sleep(SLOW_S)
                return done()
            case "full" if call.kind in ALLOCATES:
                if is_first and torn is not None:
                    return torn()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), call.path)
            case "read-only" if call.kind in CHANGES:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), call.path)
            case "error" if is_first:
                if call.kind == "close":
                    done()  # a file is closed even if that fails
                raise OSError(errno.EIO, os.strerror(errno.EIO), call.path)
            case "torn" if is_first:
                (torn or done)()
                raise OSError(errno.EIO, os.strerror(errno.EIO), call.path)
            case "death" if is_first:
                if torn is not None:
                    torn()
                os._exit(KILLED)
        return done()

    # What is in the folder.

    def _inside(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The path, if it is one in the folder."""
        if isinstance(path, int):
            return self._paths.get(path)
        if dir_fd is not None:
            base = self._paths.get(dir_fd)
            return None if base is None else f"{base}{os.sep}{os.fsdecode(path)}"
        text = os.path.normpath(Path.cwd() / os.fsdecode(path))
        return text if text == self._root or text.startswith(self._root + os.sep) else None

    # The calls.

    def _patches(self) -> list[tuple[Any, str, Any]]:
        patches: list[tuple[Any, str, Any]] = [
            (os, "open", self._os_open(os.open)),
            (os, "write", self._os_write(os.write)),
            (os, "close", self._os_close(os.close)),
            (os, "sendfile", self._os_sendfile(os.sendfile)),
            (os, "rename", self._of_two("rename", os.rename)),
            (os, "replace", self._of_two("rename", os.replace)),
            (os, "link", self._of_two("link", os.link)),
            (fcntl, "flock", self._of_handle("lock", fcntl.flock)),
            (io, "open", self._io_open(io.open)),
            (builtins, "open", self._io_open(builtins.open)),
        ]
        for name in ("fsync", "fdatasync"):
            patches.append((os, name, self._of_handle("fsync", getattr(os, name))))
        for name, kind in (
            ("mkdir", "mkdir"),
            ("rmdir", "rmdir"),
            ("unlink", "unlink"),
            ("remove", "unlink"),
            ("truncate", "truncate"),
            ("ftruncate", "truncate"),
            ("scandir", "list"),
            ("listdir", "list"),
        ):
            patches.append((os, name, self._of_path(kind, getattr(os, name))))
        return patches

    def _of_path(self, kind: str, real: Any) -> Any:
        def patched(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            inside = self._inside(path, kwargs.get("dir_fd"))
            if inside is None:
                return real(path, *args, **kwargs)
            return self.meets(kind, inside, lambda: real(path, *args, **kwargs))

        return patched

    def _of_two(self, kind: str, real: Any) -> Any:
        def patched(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            inside = self._inside(target)
            if inside is None:
                return real(source, target, *args, **kwargs)
            return self.meets(kind, inside, lambda: real(source, target, *args, **kwargs))

        return patched

    def _of_handle(self, kind: str, real: Any) -> Any:
        def patched(handle: Any, *args: Any) -> Any:
            number = handle if isinstance(handle, int) else handle.fileno()
            inside = handle.path if isinstance(handle, _Raw) else self._paths.get(number)
            if inside is None:
                return real(handle, *args)
            return self.meets(kind, inside, lambda: real(handle, *args))

        return patched

    def _os_open(self, real: Any) -> Any:
        def patched(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
            inside = self._inside(path, kwargs.get("dir_fd"))
            if inside is None:
                return real(path, flags, *args, **kwargs)

            def opened() -> int:
                handle: int = real(path, flags, *args, **kwargs)
                self._paths[handle] = inside
                return handle

            def lost() -> None:
                real_close(real(path, flags, *args, **kwargs))

            is_new = flags & os.O_CREAT and not Path(inside).exists()
            writes = flags & (os.O_WRONLY | os.O_RDWR)
            kind = "create" if is_new else "open to write" if writes else "open to read"
            is_whole = self.fault is not None and self.fault.kind in ("full", "death")
            return self.meets(kind, inside, opened, None if is_whole else lost)

        real_close = os.close
        return patched

    def _os_write(self, real: Any) -> Any:
        def patched(handle: int, data: Any) -> Any:
            inside = self._paths.get(handle)
            if inside is None:
                return real(handle, data)
            half = memoryview(data).cast("B")[: memoryview(data).nbytes // 2]
            return self.meets("write", inside, lambda: real(handle, data), lambda: real(handle, half))

        return patched

    def _os_sendfile(self, real: Any) -> Any:
        def patched(target: int, source: int, *args: Any) -> Any:
            inside = self._paths.get(target)
            if inside is None:
                return real(target, source, *args)
            return self.meets("write", inside, lambda: real(target, source, *args))

        return patched

    def _os_close(self, real: Any) -> Any:
        def patched(handle: int) -> Any:
            inside = self._paths.pop(handle, None)
            if inside is None:
                return real(handle)
            return self.meets("close", inside, lambda: real(handle))

        return patched

    def _io_open(self, real: Any) -> Any:
        def patched(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
            inside = None if isinstance(file, int) else self._inside(file)
            if inside is None:
                return real(file, mode, buffering, *args, **kwargs)
            writes = not mode.startswith("r") or "+" in mode
            is_new = writes and not Path(inside).exists()
            kind = "create" if is_new else "open to write" if writes else "open to read"
            plain = mode.replace("b", "").replace("t", "")
            is_whole = self.fault is not None and self.fault.kind in ("full", "death")
            raw = self.meets(
                kind,
                inside,
                lambda: _Raw(self, inside, plain),
                None if is_whole else lambda: io.FileIO(inside, plain).close(),
            )
            self._paths[raw.fileno()] = inside
            buffered: Any = raw
            if buffering != 0:
                size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
                make: Any = io.BufferedRandom if "+" in mode else io.BufferedWriter if writes else io.BufferedReader
                buffered = make(raw, size)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **kwargs)

        return patched


class _Raw(io.FileIO):
    """An open file whose calls reach the layer."""

    def __init__(self, layer: DiskLayer, path: str, mode: str) -> None:
        super().__init__(path, mode)
        self.layer = layer
        self.path = path

    def write(self, data: Any) -> int:
        half = memoryview(data).cast("B")[: memoryview(data).nbytes // 2]
        real = super().write
        written: int = self.layer.meets("write", self.path, lambda: real(data), lambda: real(half))
        return written

    def readinto(self, buffer: Any) -> int:
        real = super().readinto
        count: int = self.layer.meets("read", self.path, lambda: real(buffer))
        return count

    def readall(self) -> bytes:
        real = super().readall
        data: bytes = self.layer.meets("read", self.path, real)
        return data

    def close(self) -> None:
        if self.closed:
            return
        self.layer._paths.pop(self.fileno(), None)
        self.layer.meets("close", self.path, super().close)
