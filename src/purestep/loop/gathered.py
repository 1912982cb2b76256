"""Snapshots of a run of several processes: gathered and written by process 0, read by all.

All methods but the ones of `close` are collectives: every process calls them at the same place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import tree
from ..compile import is_state, plain
from ..parallel import agreement, placement
from ..parallel import mesh as meshes
from ..snapshot import Snapshot, Snapshots
from ..types import TrainState, Tree


def shared(snapshots: Snapshots) -> Snapshots:
    """The snapshots of a run: as they are in one process, gathered in a mesh of several."""
    mesh = meshes.current_mesh()
    return snapshots if mesh is None else Gathered(snapshots)


class Gathered(Snapshots):
    """The snapshots of several processes.

    Args:
        snapshots: of this process, opened by none yet. Process 0 alone locks the directory and writes.
    """

    def __init__(self, snapshots: Snapshots) -> None:
        self._inner = snapshots
        self._position = (0, 0)
        self.directory = snapshots.directory
        self.strict = snapshots.strict
        mesh = meshes.current_mesh()
        self._is_first = mesh is None or mesh.rank == 0

    def open(self) -> None:
        agreement.from_first(self._inner.open)

    def wait(self) -> None:
        agreement.from_first(self._inner.wait)

    def check(self) -> None:
        """Not agreed: process 0 raises."""
        if self._is_first:
            self._inner.check()

    def close(self) -> None:
        """Not agreed: process 0 waits, the others have nothing to close."""
        if self._is_first:
            self._inner.close()

    def begin(self, *, updates: int, epoch: int, now: float | None = None) -> None:
        self._inner.begin(updates=updates, epoch=epoch, now=now)

    def due(self, *, updates: int, epoch: int, now: float | None = None) -> tuple[str, ...]:
        self._position = updates, epoch
        return self._inner.due(updates=updates, epoch=epoch, now=now)

    def track(self, monitor: str, *, mode: str = "min") -> None:
        self._inner.track(monitor, mode=mode)

    def steps(self) -> list[int]:
        return agreement.from_first(self._inner.steps)

    def start_over(self) -> list[int]:
        return agreement.from_first(self._inner.start_over)

    def check_space(self, state: Tree) -> None:
        whole = _whole(state)
        agreement.from_first(lambda: self._inner.check_space(whole))

    def save(self, step: int, state: Tree, **options: Any) -> None:
        whole = _whole(state)
        agreement.from_first(lambda: self._inner.save(step, whole, **options))
        if not self._is_first:
            updates, epoch = self._position
            self._inner.begin(updates=updates, epoch=epoch)

    def restore(self, template: Tree, *, step: int | None = None, only: Any = None) -> Snapshot:
        whole = _whole(template)
        found: list[Snapshot] = []

        def first() -> int:
            found.append(self._inner.restore(whole, step=step, only=only))
            return found[0].step

        used = agreement.from_first(first)
        if not self._is_first:
            reader = Snapshots(self.directory, writer=False, strict=True)
            found.append(reader.restore(whole, step=used, only=only))
        return found[0]._replace(state=_parts(found[0].state, like=template))


def _whole(state: Tree) -> Tree:
    return _mapped(lambda node: placement.full(TrainState(*node)), plain(state))


def _parts(whole: Tree, like: Tree) -> Tree:
    """The whole states of a tree, cut as those of ``like``."""
    layouts: list[Any] = []
    _mapped(lambda node: layouts.append(node.placement), plain(like))
    found = iter(layouts)

    def one(node: Any) -> Any:
        of = next(found)
        return placement.part(of.layout, node) if isinstance(of, placement.Placement) else node

    return _mapped(one, whole)


def _mapped(fn: Callable[[Any], Any], state: Tree) -> Tree:
    return tree.map(lambda node: fn(node) if is_state(node) else node, state, is_leaf=is_state)
