"""From settings to a depot. Imported only where peers are configured."""

from __future__ import annotations

from keepstep_sidecar.config import Reporting
from keepstep_sidecar.peer.credentials import FileCredentials
from keepstep_sidecar.peer.depot import PeerDepot
from keepstep_sidecar.peer.issued import IssuedCredentials
from keepstep_sidecar.peer.settings import PeerSettings
from keepstep_sidecar.volumes import VolumeSet


def depot(
    settings: PeerSettings, volumes: VolumeSet, *, run: str, reporting: Reporting | None
) -> PeerDepot:
    """The peer tier of this pod; `reporting`: the operator, which signs where no files are given.

    Raises UsageError for certificates that are no use, StorageError for an address that is taken.
    """
    if settings.files is not None:
        return PeerDepot(settings, volumes, run=run, credentials=FileCredentials(settings.files))
    assert reporting is not None, "Config checks that"
    issued = IssuedCredentials(reporting)
    return PeerDepot(settings, volumes, run=run, credentials=issued, keep_fresh=issued.keep_fresh)
