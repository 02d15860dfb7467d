"""keepstep in frameworks that own the training loop: one module each, imported only by its users.

No other part of keepstep imports these modules, or a framework. They rely on private parts of the
frameworks, which change. So each module supports the range of versions that its tests ran with, and
refuses other versions.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

from torch import distributed
from torch.optim import Optimizer

from keepstep.errors import UsageError


def require(package: str, version: str, *, at_least: str, below: str) -> None:
    """Raise UsageError for a version that was never tested."""
    if not _numbers(at_least) <= _numbers(version) < _numbers(below):
        raise UsageError(
            f"{package} {version} was never tested with this keepstep: it takes {package}"
            f" >= {at_least}, < {below}; install one of those, or another keepstep"
        )


def require_accelerate() -> None:
    """Raise UsageError for a version of accelerate that was never tested."""
    version = importlib.metadata.version("accelerate")
    require("accelerate", version, at_least="1.15", below="1.16")


def require_torch(optimizer: object) -> None:
    """Raise UsageError for an optimizer that is not a torch optimizer."""
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"keepstep cannot name the state of a {type(optimizer).__name__}: it is no"
            " torch.optim.Optimizer"
        )


def any_rank(mine: bool) -> bool:
    """Whether `mine` is true on any rank.

    One machine may know of a step that another has not heard of yet, and all ranks must decide
    alike. A collective if there are several ranks.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return mine
    said: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(said, mine)
    return any(said)


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor number of the release. A release candidate counts as its release, because it
    has the same features."""
    return tuple(int(one) for one in re.findall(r"\d+", version)[:2])
