"""A window of updates under `torch.profiler`. Whatever fails here is logged, and never ends a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..snapshot import Snapshots
from ..torch_ext import hidden
from ..types import Tree
from .call_hooks import CallHook
from .loop_state import Call, LoopState

if TYPE_CHECKING:  # loads pydantic, which takes half as long as the rest of `import purestep`
    from ..config import FitConfig

_log = logging.getLogger("purestep")


def profiler(config: FitConfig, directory: Path | None, *, updates: int, rank: int) -> Profiler | None:
    """Return the profiler of a run; None without a window, in a dry run, and in all processes but the first.

    Args:
        config: of the run.
        directory: of the snapshots, where the trace goes unless the config names another; None: the working directory.
        updates: done before this call of `fit`, for the name of the trace.
        rank: of this process.
    """
    if config.profile is None or config.fast_dev_run or rank > 0:
        return None
    first, end, *named = config.profile
    folder = Path(str(named[0])) if named else directory or Path()
    return Profiler(int(first), int(end), folder / f"trace_{updates + int(first)}-{updates + int(end) - 1}.json.gz")


class Profiler(CallHook):
    """Records the updates ``first`` to ``end - 1`` of a call of `fit`, and writes their trace.

    The update before the window is recorded too, and dropped: the first use of the profiler is slow.

    Args:
        first: counted from 0.
        end: larger than ``first``.
        path: of the trace.
    """

    def __init__(self, first: int, end: int, path: Path) -> None:
        self._warmup = min(first, 1)
        self._begin, self._end = first - self._warmup, end
        self._count = end - first
        self._path = path.absolute()  # a callback may call os.chdir
        self._updates = 0  # closed windows of accumulation
        self._torchs: Any = None

    def before_call(self, state: Tree, batch: Any, loop: LoopState) -> None:
        """Start before the first call of the window."""
        if self._updates == self._begin and self._torchs is None and self._count:
            self._guarded(self._start)

    def after_call(self, state: Tree, call: Call) -> None:
        """Count an update; stop and write behind the last one."""
        self._updates += call.closing
        if call.closing and self._torchs is not None:
            self._guarded(self._torchs.step)
            if self._updates == self._end:
                self._close()

    def end(self, error: BaseException | None, snapshots: Snapshots | None) -> None:
        self._close()

    def _close(self) -> None:
        """Stop, and write what has been recorded."""
        torchs, self._torchs, self._count = self._torchs, None, 0
        if torchs is not None:
            self._guarded(torchs.stop)

    def _start(self) -> None:
        if hidden.is_profiling():
            raise RuntimeError("another profiler is active")
        schedule = None  # torch warns of one without a warm-up
        if self._warmup:
            schedule = torch.profiler.schedule(wait=0, warmup=1, active=self._count, repeat=1)
        torchs = torch.profiler.profile(schedule=schedule, on_trace_ready=self._write, acc_events=True)
        torchs.start()
        self._torchs = torchs

    def _write(self, torchs: Any) -> None:
        self._guarded(lambda: self._export(torchs))

    def _export(self, torchs: Any) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torchs.export_chrome_trace(str(self._path))
        _log.info("wrote the profile %s, for https://ui.perfetto.dev or chrome://tracing", self._path)

    def _guarded(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            _log.warning("the run is not profiled: %s: %s", type(error).__name__, error)
            torchs, self._torchs, self._count = self._torchs, None, 0
            if torchs is not None:
                with suppress(Exception):  # it may have stopped already
                    torchs.stop()
