"""Names of the entries of a vector in a history: ``f1[0]``, ``f1[1]``, ..., of a matrix ``f1[0][1]``; the best of the
members of an ensemble is ``val_loss[best]``. The names of entries are reserved: no metric of a step may have one."""

from __future__ import annotations


def entry_name(name: str, *place: int) -> str:
    """The name of an entry.

    Example:
        >>> entry_name("f1", 0), entry_name("f1", 0, 1), entry_name("loss")
        ('f1[0]', 'f1[0][1]', 'loss')
    """
    return name + "".join(f"[{index}]" for index in place)


def best_name(name: str) -> str:
    """The name of the best of all entries.

    Example:
        >>> best_name("val_loss")
        'val_loss[best]'
    """
    return f"{name}[best]"


def vector_name(name: str) -> str | None:
    """The name of the vector that an entry belongs to; None if the name is not that of an entry.

    Example:
        >>> vector_name("f1[0]"), vector_name("f1[0][1]"), vector_name("val_loss[best]")
        ('f1', 'f1[0]', None)
    """
    vector, _, index = name.removesuffix("]").rpartition("[")
    return vector if vector and name.endswith("]") and index.isdecimal() else None


def entry_place(name: str) -> tuple[int, ...]:
    """The place of an entry in its vector or matrix; () if the name is not that of an entry.

    Example:
        >>> entry_place("f1[0]"), entry_place("f1[0][1]"), entry_place("val_loss[best]")
        ((0,), (0, 1), ())
    """
    vector = vector_name(name)
    return () if vector is None else (*entry_place(vector), int(name[len(vector) + 1 : -1]))


def base_name(name: str) -> str:
    """The name of a metric without the place of an entry.

    Example:
        >>> base_name("f1[0][1]"), base_name("loss"), base_name("val_loss[best]")
        ('f1', 'loss', 'val_loss')
    """
    vector = vector_name(name)
    return name.removesuffix("[best]") if vector is None else base_name(vector)
