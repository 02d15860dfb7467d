"""Reads one component of the step that a restore would bring back, and changes nothing.

An adapter has to know some things of the step before the components of a restore exist: which
training it is of, and the states of callbacks that then build parameter groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keepstep.client.session import Session
from keepstep.core.vote import Decision
from keepstep.restore.collective import Agreed, Collective, Connect
from keepstep.restore.lending import Lending
from keepstep.restore.load import Loader
from keepstep.restore.restore import PartialRestore, Restore
from keepstep.state.take import take
from keepstep.wire.trainer import ChunkRun


def preview(
    collective: Collective,
    connect: Connect,
    begin: Callable[[Decision], Preview],
) -> int | None:
    """Fill the component of `begin`'s preview; the number of its step, None if there is none.

    The lease stays with the session. Raises as a restore does.
    """
    agreed = collective.restore(connect, begin, meet=lambda _: None, begin_anew=lambda _: None)
    parent = agreed.epoch.parent if isinstance(agreed, Agreed) else None
    return parent.step if parent is not None else None


class Preview(Restore):
    """Fills `component`, a dict; it stays empty if the step has none of that name. The images of
    other components are not read."""

    every = True  # a twin's values may differ from this rank's

    def __init__(
        self,
        name: str,
        component: dict[str, Any],
        link: Session,
        decision: Decision,
        *,
        rank: int,
        trusted: bool,
        timeout_s: float,
    ) -> None:
        components: Mapping[str, Any] = {name: component}
        super().__init__(
            components,
            link,
            decision._replace(direct=(False,) * len(decision.direct)),
            rank=rank,
            take=lambda: take(components),
            rng=False,
            trusted=trusted,
            partial=PartialRestore(),
            timeout_s=timeout_s,
        )

    def _plan(self, shown: Sequence[Any]) -> tuple[bytes, tuple[ChunkRun, ...]]:
        images = self._lent_images(shown) if self._lent else self._all_images()
        if self._lenders:
            self._lending = Lending(shown, rank=self._rank, own=self._shows)
        self._loader = Loader(
            self._components,
            self._take(),
            images,
            rank=self._rank,
            trusted=self._trusted,
        )
        self._loader.plan(whole=False)
        return b"", images.wanted

    def _finish(self, _: Sequence[Any]) -> None:
        self._loader.finish()
