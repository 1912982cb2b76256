"""Every error purestep raises on purpose: what was found, where, and the cure.

All of them are `PurestepError`s, so that one ``except ps.errors.PurestepError`` catches what the
library diagnosed and lets bugs through. The builtin second base (`ValueError`, `FileNotFoundError`)
keeps code that catches the usual Python class working.
"""

from __future__ import annotations

from typing import Any


class PurestepError(Exception):
    """What was found, where it was found, and how to cure it.

    Args:
        what: the finding, with the offending value in it.
        where: a leaf path (``params/layers.0.weight``), a file, a loader's name or a rank.
        hint: the cure, as code to paste where that is possible.

    Example:
        >>> str(ConfigError("epochs is -1", where="fit", hint="epochs=10"))
        'fit: epochs is -1 (cure: epochs=10)'
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what = what
        self.where = where
        self.hint = hint
        text = f"{where}: {what}" if where else what
        super().__init__(f"{text} (cure: {hint})" if hint else text)


class StateError(PurestepError, ValueError):
    """A state that cannot be trained: wrong leaves, mixed devices, donated memory."""


class StepContractError(PurestepError, ValueError):
    """A step that is no pure ``(state, batch) -> (state, metrics)``, or a loss that cannot be differentiated."""


class NonFiniteError(PurestepError, ArithmeticError):
    """A loss or gradient that is infinite or not a number; the state is what it was before that step.

    `fit` adds what it found out. ``state`` and ``batch`` are what `purestep.testing.record` writes down.
    """

    step: int | None = None  # the call, from 1
    loss: float | None = None
    leaves: tuple[str, ...] = ()  # what is not finite, or largest: "batch/0", "params/2.weight", "gradient of 2.weight"
    items: list[Any] | None = None  # indices into the dataset, where the loader knows them
    state: Any = None  # before that call
    batch: Any = None
    path: Any = None  # of the file that holds both, where fit has written one
    result: Any = None  # the FitResult so far

    def written(self, path: Any) -> None:
        """State and batch are in a file: the message says so."""
        self.path = path
        told = f"{self.what}; state and batch are in {path}"
        super().__init__(told, where=self.where, hint=f"ps.testing.replay({str(path)!r}, program); {self.hint}")


class DataError(PurestepError, ValueError):
    """A loader or a batch that cannot be trained on."""


class ConfigError(PurestepError, ValueError):
    """A setting that does not exist, does not fit another one, or asks what this device cannot do."""


class SnapshotError(PurestepError):
    """A snapshot that could not be written or read; the subclasses say which."""


class Corrupt(SnapshotError, ValueError):
    """A stored snapshot whose bytes are not those that were saved."""


class Mismatch(SnapshotError, ValueError):
    """A whole snapshot that does not fit the state, loader or program it is restored into."""


class NotFound(SnapshotError, FileNotFoundError):
    """No such snapshot; the message lists those that are there."""


class Locked(SnapshotError, OSError):
    """Another run is writing into this directory."""


class WriteFailed(SnapshotError, OSError):
    """A snapshot that could not be written: disk full, read-only, quota. Older snapshots are whole."""


class RankError(PurestepError, RuntimeError):
    """Something that needs more processes, or other ones, than there are."""
