"""Files that are whole or not there: temporary name, bytes on the disk, rename, directory on the disk."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from ..errors import WriteFailed
from .failpoints import failpoint

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_serial = count()


def write_failed(path: Path | str, error: BaseException, *, size: int | None = None) -> WriteFailed:
    """The `WriteFailed` that tells a failed write: which file, how many bytes, why, and what to do about it.

    Example:
        >>> import errno
        >>> print(write_failed("run/a.json", OSError(errno.EDQUOT, "Disk quota exceeded"), size=10))
        run/a.json: could not be written (10 bytes): [Errno 122] Disk quota exceeded (cure: free space or another disk)
    """
    code = error.errno if isinstance(error, OSError) else None
    reason = f"[Errno {code}] {error.strerror}" if isinstance(error, OSError) and code else _first_line(error)
    hint = {
        errno.ENOSPC: "free space or another disk",
        errno.EDQUOT: "free space or another disk",
        errno.EFBIG: "a higher limit on file sizes (ulimit -f)",
        errno.EACCES: "a directory that this user may write to",
        errno.EPERM: "a directory that this user may write to",
        errno.EROFS: "a directory on a disk that is not mounted read-only",
        errno.ENOTDIR: "the path of a directory, not of a file",
        errno.EEXIST: "the path of a directory, not of a file",
    }.get(code or 0, "")
    amount = f" ({size:,} bytes)" if size is not None else ""
    made = WriteFailed(f"could not be written{amount}: {reason}", where=str(path), hint=hint)
    made.errno = code
    return made


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


_SPECIAL = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def special_file(path: Path | str) -> str:
    """What is at the path that can be written to and not replaced: ``"a FIFO"``, ``"a socket"``, ``"a character
    device"``, ...; "" where there is a file, a directory or nothing.

    Links are followed. What lies below ``/dev`` and ``/proc`` (``/dev/stdout``, which may lead to a file) counts too.

    Example:
        >>> special_file("/dev/null"), special_file("notes.txt")
        ('a character device', '')
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return ""
    kind = next((name for is_kind, name in _SPECIAL if is_kind(mode)), "")
    if kind or not stat.S_ISREG(mode):
        return kind
    place = os.path.abspath(path)
    for _ in range(40):  # as many links as Linux follows
        if place.startswith(("/dev/", "/proc/")) and not place.startswith("/dev/shm/"):
            return "a link of the system to an open file"
        if not os.path.islink(place):
            break
        place = os.path.abspath(os.path.join(os.path.dirname(place), os.readlink(place)))
    return ""


@contextmanager
def replacing(path: Path | str) -> Generator[Path]:
    """A temporary path beside ``path``; what is written there takes the name ``path`` when the block ends well.

    The file is flushed to the disk, renamed over ``path`` and the directory is flushed, in this order: after a crash or
    a power cut ``path`` holds the old bytes or the new ones. An exception in the block leaves ``path`` as it was.

    Raises:
        WriteFailed: for every `OSError`, in the block as well.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "notes.txt"
        >>> with replacing(target) as temporary:
        ...     _ = temporary.write_text("whole")
        >>> target.read_text(), [entry.name for entry in target.parent.iterdir()]
        ('whole', ['notes.txt'])
    """
    target = Path(path)
    if kind := special_file(target):
        raise WriteFailed(f"is {kind}, which is not replaced", where=str(path), hint="pass the path of a file")
    temporary = target.with_name(f".{target.name[:100]}.{os.getpid()}.{next(_serial)}.tmp")
    try:
        failpoint("files.write")
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        sync_file(temporary)
        failpoint("files.rename")
        os.replace(temporary, target)
        failpoint("files.renamed")
        sync_directory(target.parent)
    except BaseException as error:
        size = None
        with suppress(OSError):
            size = temporary.stat().st_size
            temporary.unlink()
        if isinstance(error, OSError) and not isinstance(error, WriteFailed):
            raise write_failed(target, error, size=size) from error
        raise


def write_bytes(path: Path | str, data: bytes) -> None:
    """``data`` under ``path``, atomically and durably; see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path | str, value: Any, *, indent: int | None = 1) -> None:
    """``value`` as JSON (with NaN and Infinity, as Python writes them) under ``path``; see `replacing`.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "history.json"
        >>> write_json(path, {"loss": [0.5, 0.25]})
        >>> read_json(path)
        {'loss': [0.5, 0.25]}
    """
    write_bytes(path, (json.dumps(value, indent=indent) + "\n").encode())


def read_json(path: Path | str, *, limit: int = 1 << 28) -> Any:
    """The JSON value stored under ``path``.

    Args:
        limit: bytes; a larger file is refused before it is read.

    Raises:
        ValueError: too large, not UTF-8, not JSON, or nested too deeply.
        OSError: no such file, or not readable.
    """
    size = os.stat(path).st_size
    if size > limit:
        raise ValueError(f"{size:,} bytes of JSON, more than {limit:,}")
    try:
        return json.loads(Path(path).read_bytes())
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None


def sync_file(path: Path | str) -> None:
    """Returns when the bytes of this file are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path | str) -> None:
    """Returns when the names in this directory are on the disk; nothing where directories cannot be flushed."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _sync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no such call
            raise
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:  # on macOS fsync leaves the bytes in the drive's own cache
        with suppress(OSError):
            fcntl.fcntl(descriptor, full)  # pyright: ignore[reportOptionalMemberAccess]: `full` came from it
            return
    os.fsync(descriptor)


def sync_tree(path: Path | str) -> None:
    """Returns when every file and directory below ``path``, itself included, is on the disk."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            sync_file(os.path.join(folder, name))
        sync_directory(folder)


def remove_tree(path: Path | str) -> None:
    """Deletes a file or a directory with all that is in it; links are deleted, not followed.

    What is already gone is no error. The caller gives the tree another name first, where readers could see it half
    deleted.
    """
    if os.path.islink(path) or not os.path.isdir(path):
        failpoint("files.unlink")
        with suppress(FileNotFoundError):
            os.unlink(path)
        return
    with suppress(FileNotFoundError):
        for entry in list(os.scandir(path)):
            remove_tree(entry.path)
        failpoint("files.unlink")
        os.rmdir(path)
