"""Records of each call of a run's step: parts that settings of `fit` add, and that never change the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..diagnostics import Recording
from ..snapshot import Snapshots
from ..types import Tree
from .loop_state import Call, LoopState

if TYPE_CHECKING:  # loads pydantic, which takes half as long as the rest of `import purestep`
    from ..config import FitConfig


class CallHook:
    """Is called before and after each call of the step, and at the end of the run. A subclass does what it needs."""

    def before_call(self, state: Tree, batch: Any, loop: LoopState) -> None:
        """Before a call of train_step.

        Args:
            state: before the call, which may overwrite it.
            batch: of the call.
            loop: before the call.
        """

    def after_call(self, state: Tree, call: Call) -> None:
        """After a call of train_step or flush."""

    def recording(self) -> tuple[Recording, ...]:
        """Return the calls for `FitResult.recording`."""
        return ()

    def end(self, error: BaseException | None, snapshots: Snapshots | None) -> None:
        """At the end of the run, which may be an error."""


def opened(config: FitConfig) -> list[CallHook]:
    """Return the hooks that the settings name."""
    from .recorder import BatchRecorder  # late: few runs record something

    return [BatchRecorder(config.record)] if config.record else []
