"""Points at which a test makes the disk, the process or the clock fail, in a real process."""

from __future__ import annotations

from collections.abc import Callable

_hook: Callable[[str], object] | None = None


def set_hook(hook: Callable[[str], object] | None) -> Callable[[str], object] | None:
    """Call this function at every failpoint, with the name of the point; None: no function. Only tests set it.

    Example:
        >>> passed = []
        >>> before = set_hook(passed.append)
        >>> failpoint("files.write")
        >>> _ = set_hook(before)
        >>> passed
        ['files.write']

    Returns:
        The hook before.
    """
    global _hook
    before, _hook = _hook, hook
    return before


def failpoint(name: str) -> None:
    """Call the hook of a test, if one is set, with the name of this point."""
    if _hook is not None:
        _hook(name)
