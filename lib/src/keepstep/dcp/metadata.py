"""The skeleton of an image of a `dcp.save`: what its header says besides boxes, shapes and dtypes.

Three things: the names of the values that are not tensors (their bytes are in the extras), which
entries are boxes of one tensor (`name@0`, `name@1`), and the planner's mapping from flat names to
paths. All of it stays the same as long as the keys of the state dict do. So DCP's `Metadata` of a
step is rebuilt from the headers alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keepstep.errors import FormatError, UsageError
from keepstep.image import strictjson

_MARK = "dcp"

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class Tree:
    """The tree of one rank's image of a `dcp.save`.

    `values`: names of the values that are not tensors. `boxes`: for each entry that is not named
    after its tensor, the name of the tensor. `paths`: the path of each flat name in the nested
    state dict; None if the planner did not flatten it. `foreign`: a `Checkpointer` made the image,
    which has another kind of tree.
    """

    values: tuple[str, ...] = ()
    boxes: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, KeyPath] | None = None
    foreign: bool = False

    def render(self) -> str:
        """The skeleton for the header. Raises UsageError for a path that JSON would change."""
        if self.paths is not None:
            _check_paths(self.paths)
        tree = {
            _MARK: 1,
            "values": list(self.values),
            "boxes": dict(self.boxes),
            "paths": None if self.paths is None else {k: list(p) for k, p in self.paths.items()},
        }
        return json.dumps(tree, separators=(",", ":"))

    @classmethod
    def parse(cls, skeleton: str) -> Tree:
        """The inverse of `render`; empty and `foreign` for an image of a `Checkpointer`.

        Raises FormatError.
        """
        try:
            tree = strictjson.loads(skeleton, what="the tree of this image") if skeleton else None
            if not isinstance(tree, dict) or _MARK not in tree:
                return cls(foreign=True)
            paths = tree["paths"]
            return cls(
                values=tuple(map(_text, tree["values"])),
                boxes={_text(k): _text(v) for k, v in tree["boxes"].items()},
                paths=None if paths is None else {k: _path(p) for k, p in paths.items()},
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FormatError(f"the tree of this image makes no sense ({error})") from error


def paths_of(planner_data: Any) -> Mapping[str, KeyPath] | None:
    """The mapping that the stock planner leaves in a plan; None if there is none.

    Raises UsageError for the data of another planner, which could only be pickled.
    """
    if planner_data is None:
        return None
    if not isinstance(planner_data, Mapping):
        raise UsageError(
            f"the planner's data is a {type(planner_data).__name__}, which keepstep does not keep:"
            " only the mapping of names to paths that DefaultSavePlanner makes"
        )
    return planner_data


def _check_paths(paths: Mapping[str, KeyPath]) -> None:
    for name, path in paths.items():
        if type(name) is not str or any(type(one) not in (str, int) for one in path):
            raise UsageError(f"the planner maps {name!r} to {path!r}: only strings and numbers can")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{strictjson.quoted(value)} is not a string")
    return value


def _path(value: object) -> KeyPath:
    if not isinstance(value, list) or any(type(one) not in (str, int) for one in value):
        raise TypeError(f"{strictjson.quoted(value)} is not a path")
    return tuple(value)
