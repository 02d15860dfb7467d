"""Which epochs belong to one run. Pure.

Epochs are kin when one is the parent of the other, or when one run's record lists both; but a fork
is no kin of the run that it began from, or all forks of one step were. Two families in one archive
are two runs that share a name: restoring from the one what the other saved would be a mix of two
models, so neither is restored, nor anything deleted.
"""

from __future__ import annotations

from collections.abc import Iterable

from keepstep.steps import Epoch, EpochId


def families(records: Iterable[Iterable[Epoch]]) -> list[frozenset[EpochId]]:
    """The families among these records (one a step, and one for the run itself), oldest first."""
    found: list[set[EpochId]] = []
    for record in records:
        kin = {id for epoch in record for id in _mentioned(epoch)}
        if not kin:
            continue
        related = [one for one in found if one & kin]
        found = [one for one in found if not one & kin]
        found.append(kin.union(*related))
    return sorted(map(frozenset, found), key=min)


def rooted(records: Iterable[Iterable[Epoch]]) -> list[frozenset[EpochId]]:
    """The families of which it is known where they began. A family without may be a later part of
    any of them: a pod that was replaced knows only the epochs since then."""
    told = [tuple(record) for record in records]
    roots = {one.id for record in told for one in record if one.parent is None or one.origin}
    return [family for family in families(told) if family & roots]


def _mentioned(epoch: Epoch) -> Iterable[EpochId]:
    if epoch.parent is None or epoch.origin:
        return (epoch.id,)
    return (epoch.id, epoch.parent.epoch)
