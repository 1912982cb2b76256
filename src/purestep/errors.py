"""The errors that purestep raises. Each says what is wrong, where, and the cure.

``except ps.errors.PurestepError`` catches all of them and no bugs. The second base class (`ValueError`,
`FileNotFoundError`) keeps code working that catches the usual Python error.
"""

from __future__ import annotations

import re
from typing import Any

_HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Replace the characters that act on a terminal, or turn the direction of a text, by their escapes.

    Example:
        >>> print(printable("loss\\x1b[2J"))
        loss\\x1b[2J

    Names of leaves, metrics, runs and hosts may come from files of other people. Line breaks and tabs stay.
    """
    return _HARMFUL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message, of at most 300 characters.

    Example:
        >>> first_line(OSError("the disk is full\\nat sector 7"))
        'OSError: the disk is full'
    """
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


class PurestepError(Exception):
    """The base class: what is wrong, where, and the cure.

    Example:
        >>> str(ConfigError("epochs is -1", where="fit", hint="epochs=10"))
        'fit: epochs is -1 (cure: epochs=10)'

    Args:
        what: the problem, with the wrong value in it.
        where: a leaf path (``params/layers.0.weight``), a file, the name of a loader, or a rank.
        hint: the cure, if possible as code to paste.
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what = what
        self.where = where
        self.hint = hint
        text = f"{where}: {what}" if where else what
        super().__init__(f"{text} (cure: {hint})" if hint else text)

    def __str__(self) -> str:
        return printable(super().__str__())


class StateError(PurestepError, ValueError):
    """A state cannot be trained: wrong leaves, mixed devices, donated memory."""


class StepContractError(PurestepError, ValueError):
    """A step is no pure ``(state, batch) -> (state, metrics)``, or its loss cannot be differentiated."""


class NonFiniteError(PurestepError, ArithmeticError):
    """A loss or gradient is infinite or not a number. The state is the one before that step, without its
    accumulation window.

    `fit` fills the attributes below. `purestep.testing.record` writes ``state`` and ``batch`` to a file.
    """

    step: int | None = None  # the call, from 1
    loss: float | None = None
    leaves: tuple[str, ...] = ()  # not finite, or largest: "batch/0", "gradient of 2.weight"
    items: list[Any] | None = None  # indices into the dataset, if the loader provides them
    state: Any = None  # before that call
    batch: Any = None
    path: Any = None  # the file with state and batch, if fit has written one
    result: Any = None  # the FitResult so far

    def written(self, path: Any) -> None:
        """Add the file with state and batch to the message."""
        self.path = path
        text = f"{self.what}; state and batch are in {path}"
        super().__init__(text, where=self.where, hint=f"ps.testing.replay({str(path)!r}, program); {self.hint}")


class DataError(PurestepError, ValueError):
    """A loader or a batch cannot be trained on."""


class ConfigError(PurestepError, ValueError):
    """A setting does not exist, contradicts another one, or needs an ability that this device lacks."""


class SnapshotError(PurestepError):
    """A snapshot could not be written or read; the subclasses say why."""


class Corrupt(SnapshotError, ValueError):
    """The bytes of a stored snapshot are not the bytes that were saved."""


class Mismatch(SnapshotError, ValueError):
    """An intact snapshot does not fit the state, loader or program that it is restored into."""


class NotFound(SnapshotError, FileNotFoundError):
    """The snapshot does not exist; the message lists those that do."""


class Locked(SnapshotError, OSError):
    """Another run writes into this directory."""


class WriteFailed(SnapshotError, OSError):
    """A snapshot could not be written: disk full, read-only, quota. Older snapshots are intact."""


class RankError(PurestepError, RuntimeError):
    """The call needs several processes, or others than there are."""
