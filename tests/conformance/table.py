"""The table: what is trained, and what comes of it with `torch.save` and with keepstep.

A row declares both results. The test of a row fails unless exactly these are seen, so the page
(docs/conformance.md) is written from the declarations.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


class Result(enum.Enum):
    """What a restarted training is beside an undisturbed one. In the page as it is written here."""

    EQUAL = "equal"
    DIFFERS = "differs"
    AS_CONTROL = "as control"
    DIFFERS_LESS = "differs less"
    RAISES = "raises"
    REFUSED_AT_START = "refused at the start"
    REFUSED_AT_FIRST_SAVE = "refused at the first save"
    NAMED_AT_SAVE = "named at save"


NOT_WORSE = {
    Result.EQUAL: set(Result),
    Result.AS_CONTROL: {Result.DIFFERS},
    Result.DIFFERS_LESS: {Result.DIFFERS},
    Result.REFUSED_AT_START: set(Result),
    Result.REFUSED_AT_FIRST_SAVE: set(Result),
    Result.NAMED_AT_SAVE: {Result.DIFFERS, Result.RAISES},
    Result.RAISES: {Result.RAISES},
}
"""Results of keepstep, and the results of the control beside which each is allowed. What is not
equal needs a reason. A refusal by the end of the first step costs nothing that was trained."""


@dataclass(kw_only=True)
class Training:
    """A training script: what it names as its state, and its loop.

    Give `step`, which trains one step, or `loop`, which trains all steps from the given one and
    yields after each. What either gives is compared, like a loss.

    - `final`: what else is compared at the end, and after each restore.
    - `prepare`: called before the restore, with the newest step that there is.
    - `restored`: called after the restore of a step.
    - `ends`: called after the last step, before the Checkpointer is closed.
    - `options`: of the Checkpointer.
    - `uncompared`: components that the other ways to train do not use.
    """

    components: dict[str, Any]
    step: Callable[[int], Any] | None = None
    loop: Callable[[Life], Iterator[Any]] | None = None
    final: Callable[[], Any] = lambda: None
    prepare: Callable[[int | None], Any] = lambda newest: None
    restored: Callable[[], Any] = lambda: None
    ends: Callable[[], Any] = lambda: None
    options: dict[str, Any] = field(default_factory=dict)
    rng_later: bool = False
    uncompared: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Life:
    """What a loop may know. `checkpointer`: None unless it trains with keepstep."""

    first: int
    steps: int
    checkpointer: Any = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One training. `message`: what the warning or the error of keepstep must contain. `observed`:
    whether the state is also compared directly after a restore. `optimizer`: its name in the table
    of optimizers, if it is about one."""

    kind: str
    what: str
    make: Callable[[], Training]
    steps: int = 8
    kills: tuple[int, ...] = (2, 5)
    control: Result = Result.EQUAL
    keepstep: Result = Result.EQUAL
    reason: str = ""
    message: str = ""
    observed: bool = True
    packages: tuple[str, ...] = ()
    optimizer: str = ""

    @property
    def name(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", f"{self.kind} {self.what}".lower()).strip("-")


class Table:
    """The rows of one kind."""

    def __init__(self, kind: str, *packages: str) -> None:
        self.kind, self.packages = kind, packages
        self.rows: list[Row] = []

    def add(self, what: str, make: Callable[..., Training], *given: Any, **declared: Any) -> None:
        """A row that trains what `make(*given)` makes."""
        packages = declared.pop("packages", self.packages)
        self.rows.append(
            Row(
                kind=self.kind,
                what=what,
                make=lambda: make(*given),
                packages=packages,
                **declared,
            )
        )

    def row(self, what: str, **declared: Any) -> Callable[..., Callable[[], Training]]:
        def add(make: Callable[[], Training]) -> Callable[[], Training]:
            self.add(what, make, **declared)
            return make

        return add
