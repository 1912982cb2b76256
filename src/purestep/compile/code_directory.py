"""The directory of compiled code, which inductor's cache shares. Only this user and root may write in it or replace it.

A library, a module or a pickle in it is code that this process runs. Torch takes the directory that is named after the
user in the system's temporary one, whoever has created it; or that of ``TORCHINDUCTOR_CACHE_DIR``.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
import tempfile
from pathlib import Path

from ..errors import ConfigError

_log = logging.getLogger("purestep")
_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_WRITABLE = "is one that others can write"


def directory(*, whole: bool = False) -> Path:
    """The directory, which exists, and which torch uses from now on. If the present one may contain code of others, it
    is a private one, and a warning says so.

    Args:
        whole: look at everything in the directory too (some microseconds a file), as must be done before inductor,
            which loads what it finds there, is used.

    Raises:
        ConfigError: the private directory may contain code of others too.
    """
    from torch._inductor.runtime import cache_dir_utils

    given = os.environ.get(_VARIABLE) or cache_dir_utils.default_cache_dir()
    place = _chosen(os.path.abspath(given), whole)
    os.environ[_VARIABLE] = str(place)
    return place


def is_own(path: Path) -> bool:
    """True if a file or directory, not a link, belongs to this user or root, and nobody else may write it."""
    found = path.lstat()
    plain = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
    return plain and _is_owners(found) and not found.st_mode & _OTHERS


def private() -> Path:
    """The directory of this user alone, which may not exist."""
    return Path(tempfile.gettempdir(), f"purestep_{os.getuid()}")


def _is_owners(found: os.stat_result) -> bool:
    return found.st_uid in (0, os.getuid())


@functools.cache
def _chosen(given: str, whole: bool) -> Path:
    place = Path(given)
    problem = _problem(place) or (_problem_inside(place) if whole else "")
    if not problem:
        return place.resolve()  # a link on the way may lead elsewhere later
    other, cure = private(), f"set {_VARIABLE} to a directory of yours"
    if found := _problem(other) or _problem_inside(other):
        raise ConfigError(f"{place} {problem}, and {other} {found}", where="compiled code", hint=cure)
    if problem.startswith(_WRITABLE):  # mode 0700, because torch writes more files there, by the user's umask
        cure += f", or chmod -R go= {given} if you trust all that it contains"
    _log.warning("%s %s: compiled code is kept in %s (cure: %s)", given, problem, other, cure)
    return other


def _problem(place: Path) -> str:
    """Why code in a directory may be that of others; "" if it cannot be. Creates the directory."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        link, found = place.lstat(), place.stat()
        if not (_is_owners(link) and _is_owners(found)):
            return "belongs to another user"
        if found.st_mode & _OTHERS:
            return f"{_WRITABLE} (mode {stat.S_IMODE(found.st_mode):o})"
        return _problem_above(place)
    except OSError as error:
        return f"cannot be used ({error.strerror})"


def _problem_above(place: Path) -> str:
    """The same for each directory above, whose owner and writers can rename what it contains. With the sticky bit, as
    ``/tmp`` has it, only the owner can."""
    for above in place.resolve().parents:
        found = above.stat()
        if not _is_owners(found):
            return f"is in {above}, which belongs to another user"
        if found.st_mode & _OTHERS and not found.st_mode & stat.S_ISVTX:
            return f"is in {above}, which others can write (mode {stat.S_IMODE(found.st_mode):o}, without sticky bit)"
    return ""


def _problem_inside(place: Path) -> str:
    """The same for what lies in the directory, in which other users may have been able to write before."""
    if not os.access(place, os.W_OK):
        return "cannot be written"
    is_open = place.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH)
    waiting = [place]
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
            for entry in entries:
                found = entry.stat(follow_symlinks=False)
                if not _is_owners(found):
                    return f"contains {entry.path}, which belongs to another user"
                if is_open and found.st_mode & _OTHERS and not entry.is_symlink():
                    return f"contains {entry.path}, which others can write"
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
        except FileNotFoundError:  # another process has removed it meanwhile
            continue
        except OSError as error:
            return f"cannot be searched ({error.strerror})"
    return ""
