"""What a pickle must not hold: a copy of it would go its own way after a restore, in silence.

A scheduler in a pickle would bring an optimizer of its own, which trains nothing; a loader's
generator would be drawn from by nobody. Such objects are kept as components, in place.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

_MOST_BYTES = 64 << 20

_LIVING = (
    ("torch.optim", "Optimizer", "an optimizer"),
    ("torch.nn", "Module", "a module"),
    ("torch.utils.data", "DataLoader", "a data loader"),
    ("torch", "Generator", "a random generator"),
    ("numpy.random", "Generator", "a random generator"),
    ("numpy.random", "RandomState", "a random generator"),
    ("numpy.random", "BitGenerator", "a random generator"),
    ("random", "Random", "a random generator"),
    ("keepstep", "Checkpointer", "a Checkpointer"),
)


def held_by(value: Any) -> str | None:
    """What `value` is or holds that no pickle may hold, and what to do instead; None if there is
    nothing of that kind in the first 64 MiB of its pickle."""
    found = _Search(value).found
    if found is None:
        return None
    held, what = found
    kind = f"{type(held).__module__}.{type(held).__qualname__}"
    if held is value:
        return f"it is {what}: {_remedy(what)}"
    return (
        f"it holds {what} ({kind}), of which a pickle would make another one: {_remedy(what)}, and"
        " leave it out of this value (of the state_dict() that gives it), or give the class a"
        " state_dict() of plain values"
    )


def _remedy(what: str) -> str:
    if what == "a random generator":
        return "keep it in a dict or list of its own, or name it as a component"
    return "name it as a component of its own"


class _Search(pickle.Pickler):
    """Pickles to nowhere, until it meets something living. `found`: that object, and what it is."""

    def __init__(self, value: Any) -> None:
        super().__init__(self, protocol=4)
        self.found: tuple[Any, str] | None = None
        self._written = 0
        self._living = [
            (kind, what)
            for module, name, what in _LIVING
            if isinstance(kind := getattr(sys.modules.get(module), name, None), type)
        ]
        self._kinds = tuple(kind for kind, _ in self._living)
        try:
            self.dump(value)
        except Exception:  # a foreign __reduce__ may raise anything; `_Found` ends the search
            pass
        finally:
            self.clear_memo()

    def write(self, data: bytes) -> int:
        """Stands for the file."""
        self._written += len(data)
        if self._written > _MOST_BYTES:
            raise _Found
        return len(data)

    def persistent_id(self, value: Any) -> None:
        """Called for every object before it is pickled."""
        if isinstance(value, self._kinds):
            self.found = value, next(what for kind, what in self._living if isinstance(value, kind))
            raise _Found


class _Found(Exception):
    """Ends a search."""
