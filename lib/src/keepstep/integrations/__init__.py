"""keepstep in frameworks that own the training loop: one module each, imported only by its users.

No other part of keepstep imports these modules, or a framework. They rely on private parts of the
frameworks, which change. So each module names the parts that it needs. A version that lacks one of
them is refused; a version that was never tested and has them all is tried, with a warning.
"""

from __future__ import annotations

import dis
import functools
import importlib.metadata
import inspect
import logging
import os
import pkgutil
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import distributed
from torch.optim import Optimizer

from keepstep.errors import UsageError, few

log = logging.getLogger("keepstep")

_SHOWN = 8

TESTED = {
    "accelerate": ("1.15", "1.15"),
    "deepspeed": ("0.19", "0.19"),
    "lightning": ("2.6", "2.6"),
    "pytorch_lightning": ("2.6", "2.6"),
    "sentence_transformers": ("6.2", "6.2"),
    "torchtitan": ("0.3", "0.3"),
    "transformers": ("5.19", "5.23"),
    "trl": ("1.16", "1.16"),
    "ultralytics": ("8.4", "8.4"),
}
"""The lowest and the highest release of each package that was tested."""


def require_framework_hooks(
    package: str, version: str, *, hooks: Mapping[str, Iterable[str]]
) -> None:
    """Raise UsageError if this version of a package lacks a hook; warn once if it is not between
    those of `TESTED`.

    `hooks`: what the adapter calls, replaces or reads, by owner (`module:Class`, or `module:`):
    `method`, `method(parameter, parameter)`, or an attribute that the code of the class assigns.
    """
    lowest, highest = TESTED[package]
    missing = [
        f"{owner.partition(':')[2] or owner}.{name}"
        for owner, names in hooks.items()
        for name in names
        if not _exists(owner, name)
    ]
    if missing:
        raise UsageError(
            f"{package} {version} lacks what keepstep needs of it: {few(missing, _SHOWN)}; install"
            f" {package} {lowest} to {highest}, which were tested, or another keepstep"
        )
    if not _numbers(lowest) <= _numbers(version) <= _numbers(highest):
        _warn_untested(package, version, lowest, highest)


@functools.cache
def _warn_untested(package: str, version: str, lowest: str, highest: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        log.warning(
            "keepstep: %s %s was never tested with this keepstep, which was tested with %s to %s:"
            " it has all that keepstep needs of it, so it is tried [integration.version_untested]",
            *(package, version, lowest, highest),
        )


def _exists(owner: str, hook: str) -> bool:
    name, _, parameters = hook.removesuffix(")").partition("(")
    try:
        within = pkgutil.resolve_name(owner)
    except (ImportError, AttributeError):
        return False
    if not hasattr(within, name):
        return isinstance(within, type) and any(
            name in find_attributes_set_in_code(base) for base in within.__mro__
        )
    taken = inspect.signature(getattr(within, name)).parameters if parameters else {}
    return all(word in taken for word in parameters.split(", ") if word)


@functools.cache
def find_attributes_set_in_code(kind: type) -> frozenset[str]:
    """The names of the attributes that the code of a class, without its bases, assigns."""
    functions = [inspect.unwrap(var) for var in vars(kind).values() if hasattr(var, "__code__")]
    found, argument = set(), 0
    for code in (function.__code__ for function in functions):
        # as `dis` finds them, in a fifteenth of the time that it takes: 0.07 s for Trainer
        for operation, low_byte in zip(code.co_code[::2], code.co_code[1::2], strict=True):
            argument = argument << 8 | low_byte
            if operation == dis.opmap["STORE_ATTR"]:
                found.add(code.co_names[argument])
            argument = argument if operation == dis.EXTENDED_ARG else 0
    return frozenset(found)


def require_supported_accelerate() -> None:
    """Raise UsageError for a version of accelerate that the adapters cannot follow."""
    require_framework_hooks(
        "accelerate",
        importlib.metadata.version("accelerate"),
        hooks={
            "accelerate.state:AcceleratorState": ["distributed_type"],
            "accelerate.data_loader:DataLoaderAdapter": ["base_dataloader"],
            "accelerate.data_loader:DataLoaderShard": ["iteration"],
            "accelerate.data_loader:": ["DataLoaderDispatcher"],
        },
    )


def mix_in(instance: Any, mixin: type, options: Mapping[str, Any]) -> None:
    """Put a mixin before the class of an instance. `options`: those of `Checkpointer`, which the
    mixin finds as `keepstep_options`."""
    kind = type(instance)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    instance.__class__ = type(kind.__name__, (mixin, kind), names)
    instance.keepstep_options = options


def require_torch_optimizer(optimizer: object) -> None:
    """Raise UsageError for an optimizer that is not a torch optimizer."""
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"keepstep cannot name the state of a {type(optimizer).__name__}: it is no"
            " torch.optim.Optimizer"
        )


def is_true_on_any_rank(mine: bool) -> bool:
    """Whether `mine` is true on any rank.

    One machine may know of a step that another has not heard of yet, and all ranks must decide
    alike. A collective if there are several ranks.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return mine
    flags: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(flags, mine)
    return any(flags)


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor number of the release. A release candidate counts as its release, because it
    has the same features."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
