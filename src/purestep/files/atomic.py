"""Write files atomically: write under a temporary name, flush, rename, flush the directory."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from ..errors import ConfigError, WriteFailed, first_line
from .failpoints import failpoint
from .reading import regular

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def local_path(where: str, **paths: Any) -> Path:
    """Convert the one keyword argument, a path of a local disk, to a `Path`.

    Example:
        >>> local_path("Snapshots", directory="runs/digits").name
        'digits'

    Raises:
        ConfigError: the value is not a path, is empty (``Path("")`` would be the working directory), or is a URL, of
            which `Path` would make a folder of the working directory.
    """
    ((name, path),) = paths.items()
    text = os.fspath(cast("str | os.PathLike[str]", path)) if isinstance(path, str | os.PathLike) else ""
    if not text:
        hint = f'pass a path such as "runs/name", or "." for the working directory, as {name}'
        raise ConfigError(f"{name}={path!r} is not a path", where=where, hint=hint)
    if _URL.match(text):
        raise ConfigError(
            f"{name}={text!r} is a URL, and files are written to local disks",
            where=where,
            hint="pass a local directory or one where the bucket is mounted (gcsfuse, s3fs), and copy it to the bucket",
        )
    return Path(text)


def of_run(directory: Path | None) -> str:
    """The directory of a run for a line of text, short; "" for None.

    Example:
        >>> of_run(Path("/data/runs/digits")), of_run(None)
        (' of runs/digits', '')
    """
    return "" if directory is None else f" of {'/'.join(directory.parts[-2:])}"


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # `Path` makes one slash of two; one letter is a drive of Windows


def write_failed(path: Path | str, error: BaseException, *, size: int | None = None) -> WriteFailed:
    """Build the `WriteFailed` for a failed write, with the file, the number of bytes, the reason and the cure.

    Example:
        >>> import errno
        >>> print(write_failed("run/a.json", OSError(errno.EDQUOT, "Disk quota exceeded")))
        run/a.json: could not be written: [Errno 122] Disk quota exceeded (cure: free space or use another disk)
    """
    code = error.errno if isinstance(error, OSError) else None
    reason = f"[Errno {code}] {error.strerror}" if isinstance(error, OSError) and code else first_line(error)
    hint = {
        errno.ENOSPC: "free space or use another disk",
        errno.EDQUOT: "free space or use another disk",
        errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
        errno.EACCES: "use a directory that this user may write to",
        errno.EPERM: "use a directory that this user may write to",
        errno.EROFS: "use a directory on a disk that is not mounted read-only",
        errno.ENOTDIR: "pass the path of a directory, not of a file",
        errno.EEXIST: "pass the path of a directory, not of a file",
    }.get(code or 0, "")
    amount = f" ({size:,} bytes)" if size is not None else ""
    failed = WriteFailed(f"could not be written{amount}: {reason}", where=str(path), hint=hint)
    failed.errno = code
    return failed


def other_kind(path: Path | str) -> str:
    """The kind of a path that is neither missing nor a regular file; "" for these two. ``/dev/stdout`` is a link.

    Example:
        >>> other_kind("/dev/null"), other_kind("notes.txt")
        ('a FIFO, a socket or a device', '')
    """
    try:
        kind = stat.S_IFMT(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return ""
    kinds = {stat.S_IFREG: "", stat.S_IFDIR: "a directory", stat.S_IFLNK: "a link"}
    return kinds.get(kind, "a FIFO, a socket or a device")


@contextmanager
def replacing(path: Path | str) -> Generator[Path]:
    """Yield a temporary path in the same directory, and rename it to ``path`` at the end of the block.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "notes.txt"
        >>> with replacing(target) as temporary:
        ...     _ = temporary.write_text("whole")
        >>> target.read_text(), [entry.name for entry in target.parent.iterdir()]
        ('whole', ['notes.txt'])

    Flushes the file, renames it, and flushes the directory, in this order: after a crash or a power cut, ``path`` has
    the old bytes or the new ones. After an exception in the block, ``path`` is unchanged. The temporary file is there,
    empty; its name is random, so that nobody can put a link there before.

    Raises:
        WriteFailed: an `OSError` occurred, here or in the block.
    """
    target = Path(path)
    if kind := other_kind(target):
        raise WriteFailed(f"the path is {kind} and cannot be replaced", where=str(path), hint="pass the path of a file")
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.tmp")
    try:
        failpoint("files.write")
        target.parent.mkdir(parents=True, exist_ok=True)
        open(temporary, "xb", opener=regular).close()
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
    """Write ``data`` to ``path``, atomically and durably; see `replacing`."""
    with replacing(path) as temporary, open(temporary, "wb", opener=regular) as file:
        file.write(data)


def sync_file(path: Path | str) -> None:
    """Wait until the bytes of this file are on the disk."""
    writable = os.name == "nt"  # Windows flushes no file that was opened to read
    descriptor = regular(os.fspath(path), os.O_RDWR if writable else os.O_RDONLY)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path | str) -> None:
    """Wait until the names in this directory are on the disk. Does nothing if directories cannot be flushed."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _sync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems lack this call
            raise
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:  # on macOS fsync leaves the bytes in the drive's cache
        with suppress(OSError):
            fcntl.fcntl(descriptor, full)  # pyright: ignore[reportOptionalMemberAccess]: `full` came from it
            return
    os.fsync(descriptor)


def sync_tree(path: Path | str) -> None:
    """Wait until ``path`` and every file and directory below it are on the disk."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            sync_file(os.path.join(folder, name))
        sync_directory(folder)


def make_directory(path: Path) -> None:
    """Create the directory of a run and its parents. It is for this user alone (mode 0700), unless its parent is shared
    with a group on purpose (has the setgid bit): then the umask decides. An existing directory keeps its mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_shared = path.parent.stat().st_mode & stat.S_ISGID
    path.mkdir(mode=0o777 if is_shared else 0o700, exist_ok=True)


def subdirectory(root: Path, name: str) -> Path:
    """A directory in that of a run, which is created if it is missing.

    Raises:
        WriteFailed: it is a link, which is not followed, or cannot be created.
    """
    path = root / name
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise write_failed(path, error) from error
    if path.is_symlink():
        raise WriteFailed("the path is a link, which is not followed", where=str(path), hint="delete it")
    return path


_ROUNDS = 1000


def remove_tree(path: Path | str) -> None:
    """Delete a file, or a directory with its contents. Links are deleted, not followed.

    A missing file is no error. If readers could see a partly deleted tree, rename it first.

    Raises:
        OSError: the disk fails, or another process exchanges a directory for a link meanwhile.
    """
    for _ in range(_ROUNDS):  # before Python 3.13 `shutil.rmtree` stops at a name that has vanished meanwhile
        if not os.path.lexists(path):
            return
        with suppress(FileNotFoundError):
            if os.path.islink(path) or not os.path.isdir(path):
                os.unlink(path)
            else:
                shutil.rmtree(path)
    raise OSError(errno.ENOTEMPTY, "names in it come and go", str(path))
