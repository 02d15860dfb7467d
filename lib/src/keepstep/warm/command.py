"""Decides which command lines can be started warm, and by which interpreter."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

TORCHRUN: Final = "torch.distributed.run"

_PYTHON = re.compile(r"python(3(\.\d+)?)?")

_LATE: Final = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|OMP_NUM_THREADS"
    r"|(TORCHELASTIC|TORCH_NCCL|NCCL|KEEPSTEP)_\w+"
)
"""Variables that torchrun gives each worker. No import reads them, or what was read is set again
after the fork. Imports may have read any other variable, so a difference in one means a cold start.
"""


@dataclass(frozen=True)
class Python:
    """A command line of Python. `what`: the path of a script, or the name of a module."""

    kind: Literal["script", "module"]
    what: str
    arguments: tuple[str, ...]
    unbuffered: bool = False

    @property
    def torchrun(self) -> bool:
        return self.kind == "module" and self.what == TORCHRUN


def parse(argv: Sequence[str]) -> Python | None:
    """What a command line asks of Python; None if only exec can run it."""
    words = list(argv[1:])
    if os.path.basename(argv[0]) == "torchrun":
        return Python("module", TORCHRUN, tuple(words))
    if not _PYTHON.fullmatch(os.path.basename(argv[0])):
        return None
    unbuffered = words[:1] == ["-u"]
    words = words[unbuffered:]
    if words[:1] == ["-m"] and len(words) > 1:
        return Python("module", words[1], tuple(words[2:]), unbuffered)
    if words and not words[0].startswith("-"):
        return Python("script", words[0], tuple(words[1:]), unbuffered)
    return None


def interpreter(path: str) -> str | None:
    """The Python that runs the program file `path`: the file itself, or the one that its first line
    names. None if there is none.
    """
    if _PYTHON.fullmatch(os.path.basename(path)):
        return path
    try:
        with Path(path).open("rb") as file:
            first = file.readline(4096).decode(errors="replace")
    except OSError:
        return None
    words = shlex.split(first[2:]) if first.startswith("#!") else []
    found = words[0] if len(words) == 1 and os.path.isabs(words[0]) else ""
    return found if _PYTHON.fullmatch(os.path.basename(found)) else None


def late_differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names of variables that differ and that an import may have read."""
    changed = {name for name, _ in before.items() ^ now.items()}
    return sorted(name for name in changed if not _LATE.fullmatch(name))
