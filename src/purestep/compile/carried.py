"""What has been compiled, for another machine: native code among what `torch.compiler.save_cache_artifacts` saves.

Torch collects what its caches hold of a process's graphs. The code that `kept` finds again is put beside it, as
artifacts of one more kind, so that one file has all of it. It is taken where torch, the processor and this package are
the same as where it was made.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import kept
from .alone import alone

_KIND = "purestep"


def along(known: str | None) -> None:
    """Have torch save the code of that name too, if there is any. Under `alone`."""
    if known is None:
        return
    with suppress(Exception):  # another torch: it is not carried
        _register()
        _torchs().CacheArtifactManager.record_artifact(_KIND, known.partition(".")[0], _Later(kept.file_of(known)))


def count() -> int:
    """How much there is to save; the same again: nothing new."""
    return len(_torchs().CacheArtifactManager._seen_artifacts)


def saved() -> bytes | None:
    """What has been compiled in this process, as `torch.compiler.save_cache_artifacts` returns it; None: nothing."""
    with alone():
        if "torch._dynamo" in sys.modules:
            found = torch.compiler.save_cache_artifacts()
        else:  # that would load Dynamo
            found = _torchs().CacheArtifactManager.serialize()
    return None if found is None else found[0]


def taken(artifacts: bytes) -> None:
    """Put into the caches what `saved` has returned elsewhere.

    It is code that will be run, and torch unpickles a part of it: only from where nobody else writes.

    Raises:
        Exception: it cannot be parsed, and nothing was taken; or the last part that could not be taken, and the others
            were.
    """
    _register()
    # Torch's own function loads the compiler, and takes of each kind only what was saved last.
    torchs = _torchs()
    with alone():
        try:
            found = _parsed(artifacts)
        except AssertionError:  # there is more than native code
            torchs.CacheArtifactManager._ensure_cache_artifacts_registered()
            found = _parsed(artifacts)
        failed: Exception | None = None
        for artifact in (each for _, group in found for each in group):
            try:
                artifact.populate_cache()
            except Exception as error:  # the others may be as they were
                failed = error
        if failed is not None:
            raise failed


def _parsed(artifacts: bytes) -> list[tuple[str, list[Any]]]:
    torchs = _torchs()
    return torchs.AppendingByteSerializer.to_list(artifacts, deserialize_fn=torchs._deserialize_single_cache)


class _Later(NamedTuple):
    """Code that is read when it is saved, which few runs ask for."""

    file: Path

    def content(self) -> bytes:
        """Where it holds, `kept`'s record, and the library; empty where they are gone."""
        with suppress(OSError, ValueError):
            return b"%b\n%b" % (_everywhere().encode(), kept.stored(self.file))
        return b""


@functools.cache
def _register() -> None:
    torchs = _torchs()

    class Native(torchs.CacheArtifact):
        """The code of one graph: key is what it does."""

        def __init__(self, key: str, content: bytes | _Later) -> None:
            object.__setattr__(self, "key", key)  # torch's are frozen
            object.__setattr__(self, "given", content)

        @property
        def content(self) -> bytes:
            given: bytes | _Later = self.given
            return given.content() if isinstance(given, _Later) else given

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Native) and self.key == other.key

        def __hash__(self) -> int:
            return hash(self.key)

        @staticmethod
        def type() -> str:
            return _KIND

        @staticmethod
        def encode(content: bytes | _Later) -> bytes | _Later:
            return content

        def populate_cache(self) -> None:
            made_for, _, rest = self.content.partition(b"\n")
            if made_for == _everywhere().encode():
                with suppress(Exception):  # damaged, or no room: it is made here
                    kept.store(self.key, rest)
                    torchs.CacheArtifactManager.record_artifact(_KIND, self.key, self.content)  # to be carried on

    torchs.CacheArtifactFactory.register(Native)


def _torchs() -> Any:
    return importlib.import_module("torch.compiler._cache")


@functools.cache
def _everywhere() -> str:
    """The same wherever code may come from: no paths, no times."""
    inductor, own = Path(torch.__file__).parent / "_inductor", Path(__file__).parent
    sizes = [f"{file.relative_to(inductor)} {file.stat().st_size}" for file in sorted(inductor.rglob("*.py"))]
    texts = [file.read_text() for file in sorted(own.glob("*.py"))]
    return hashlib.sha256("\n".join([kept.environment(), *sizes, *texts]).encode()).hexdigest()
