"""The depot that a sidecar's configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from keepstep.steps import Epoch, StepId
from keepstep_sidecar.archive.ancestor import AncestorDepot
from keepstep_sidecar.archive.depot import ArchiveDepot
from keepstep_sidecar.archive.store import open_store
from keepstep_sidecar.config import Config


def depots(
    config: Config,
    *,
    epochs: Callable[[], Iterable[Epoch]],
    pinned: Callable[[], Collection[StepId] | None],
) -> tuple[ArchiveDepot | AncestorDepot, ...]:
    """None, the archive, or also another run's part of it, where this run begins from there.

    `epochs`: what is known to be the run's own. `pinned`: steps that stay. Raises UsageError; the
    store is not asked.
    """
    if config.archive is None:
        return ()
    own = ArchiveDepot(
        config.archive,
        open_store(config.archive),
        run=config.run,
        persist_base=config.persist_base,
        epochs=epochs,
        pinned=pinned,
    )
    if config.fork is None:
        return (own,)
    store = open_store(config.archive)
    return (own, AncestorDepot(store, config.fork, run=config.run, epochs=epochs))
