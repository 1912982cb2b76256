"""Open and read files in a run's directory, which another user may have prepared: regular files, of a limited size."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

LIMIT = 1 << 26
"""The maximum size in bytes of a JSON file: the manifest of 300,000 leaves has it."""

_FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))


def regular(path: str, flags: int) -> int:
    """The ``opener`` for `open` of a file that others may have put there: it follows no link and waits for no pipe.

    Example:
        >>> open("/dev/zero", "rb", opener=regular)
        Traceback (most recent call last):
        OSError: [Errno 22] is not a regular file: '/dev/zero'

    Raises:
        OSError: the path is a link, or is neither missing nor a regular file.
    """
    try:
        descriptor = os.open(path, flags | _FLAGS, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "is a link, which is not followed", str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return descriptor


def read_regular(path: Path | str, limit: int) -> bytes:
    """Read a regular file of at most ``limit`` bytes.

    Raises:
        OSError: the path is missing, a link, or no regular file; or the file is larger.
    """
    with open(path, "rb", opener=regular) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"has {size:,} bytes, more than the {limit:,} of such a file", str(path))
        return file.read(size)


def parsed_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not UTF-8, not JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None


def read_json(path: Path | str) -> Any:
    """Read the JSON value in a regular file of at most `LIMIT` bytes.

    Raises:
        ValueError: the text is not UTF-8, not JSON, or nested too deeply.
        OSError: as `read_regular`.
    """
    return parsed_json(read_regular(path, LIMIT))
