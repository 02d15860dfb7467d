"""`keepstep-sidecar agent clean DIR...`: removes from this node the directories of gone runs.

A run is gone when it has no CheckpointRun: the operator deletes that a `runTTL` after the job's
end, people and the end of a namespace delete it, too. In doubt nothing is removed: not while the
API server does not say that there is none, not before this process has seen for a whole time of
grace that there is none, and not where a sidecar lives or has written since. Nothing is on record
about this but in this process, so a restart begins the time of grace anew, and a full disk is
cleaned like any other.

It runs as root, in a container of its own. Others made a part of the path. So no link below the
mount is followed, and each directory is opened relative to the one above it.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import math
import os
import random
import re
import signal
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from keepstep.compile_cache import POD_NAME as COMPILE_CACHE
from keepstep.directory import OpenDirectory
from keepstep.errors import KeepstepError, StorageError
from keepstep_sidecar import log
from keepstep_sidecar.agent import run_directories
from keepstep_sidecar.agent.run_directories import DNS_LABEL, NODE_RANK
from keepstep_sidecar.log import info, warn
from keepstep_sidecar.volume.run_tree import LOCK, RECORD

_EVERY_S: Final = (1.0, 600.0)
_ASIDE: Final = ".{}.keepstep-removed"
"""A name that no run has: names of runs are DNS labels."""
_SET_ASIDE: Final = re.compile(rf"\.{DNS_LABEL.pattern}\.keepstep-removed")

Exists = Callable[[str, str], bool]
"""Whether the CheckpointRun of this namespace and name exists. Raises StorageError if that is not
certain."""


class StillUsedError(StorageError):
    """The run was alive after it had been taken for gone."""


# --- one directory -------------------------------------------------------------------------------


def remove_run_directory(
    namespace: OpenDirectory, run: str, *, gone_since: float = math.inf
) -> int:
    """Remove the run's directory; returns the number of files removed.

    `gone_since`: Unix seconds; a later write is a sign of life. Raises StillUsedError for such a
    write and for a sidecar that uses the directory, StorageError when it does not look like that of
    a run, OSError when something cannot be removed.
    """
    aside = _ASIDE.format(run)
    with _unused(namespace, run, gone_since):
        namespace.rename(run, aside)
    return namespace.remove(aside)


def _finish(namespace: OpenDirectory) -> None:
    """Remove what is left of runs that an earlier process set aside here. Raises OSError."""
    for name in filter(_SET_ASIDE.fullmatch, namespace.names()):
        found = namespace.lstat(name)
        if found is not None and found.st_uid == os.geteuid():
            info("run.removed", path=str(namespace.path / name), files=namespace.remove(name))


@contextlib.contextmanager
def _unused(namespace: OpenDirectory, name: str, latest: float) -> Iterator[None]:
    """Hold every lock that a sidecar would hold, `<node rank>/<run>/.lock`, and that of the run's
    directory, which `directories.prepare` takes for a pod that starts. Raises StorageError."""
    with contextlib.ExitStack() as held:
        run = namespace.open_subdirectory(name)
        if not _locked(held, os.open(".", os.O_RDONLY | os.O_CLOEXEC, dir_fd=run.fd)):
            raise StillUsedError(f"{run.path}: a pod starts there; nothing was removed")
        for rank in run.names():
            place = _place(run, rank)
            if place is None or not NODE_RANK.fullmatch(rank):
                raise _not_a_run(run, f"{run.path}/{rank} is no node rank's directory")
            _check_age(place, latest)
            for inside in place.names():
                if inside == COMPILE_CACHE:
                    continue  # of trainers, which do not outlive their sidecar
                inner = _place(place, inside)
                if inner is None or inside != name:
                    raise _not_a_run(run, f"{place.path}/{inside} is not this run's")
                _check_lock(held, inner)
                _check_age(inner, latest)
        yield


def _check_lock(held: contextlib.ExitStack, directory: OpenDirectory) -> None:
    """Take the directory's lock. A sidecar makes its lock before any other file. So a directory
    that is not empty and has no lock counts as used."""
    try:
        fd = directory.open_file(LOCK, os.O_RDWR)
    except FileNotFoundError:
        free = not directory.names()
    else:
        free = _locked(held, fd)
    if not free:
        raise StillUsedError(
            f"{directory.path}: a sidecar uses it, or it has no {LOCK}, so the run may not be gone;"
            " nothing was removed"
        )


def _locked(held: contextlib.ExitStack, fd: int) -> bool:
    """Lock an open file until `held` ends; False if another process has done so."""
    held.callback(os.close, fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_age(directory: OpenDirectory, latest: float) -> None:
    """Raises StillUsedError if a pod started, a step was begun or removed, or the record was
    replaced there after `latest`, in Unix seconds."""
    record = directory.lstat(RECORD)
    times = [os.fstat(directory.fd).st_mtime, 0.0 if record is None else record.st_mtime]
    if max(times) > latest:
        raise StillUsedError(
            f"{directory.path}: was written to after the run was gone; nothing was removed"
        )


def _not_a_run(run: OpenDirectory, why: str) -> StorageError:
    return StorageError(
        f"{run.path} is not the directory of one run: {why}; nothing was removed. Check its"
        " files, and delete them by hand"
    )


def _place(parent: OpenDirectory, name: str) -> OpenDirectory | None:
    """Open a directory in a directory. None for anything else, links included."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return parent.open_subdirectory(name)
    return None


# --- all of them ---------------------------------------------------------------------------------


class Cleaner:
    """Removes what gone runs left below `tops`. `grace_s`: how long a run must be gone."""

    def __init__(
        self,
        tops: Sequence[Path],
        *,
        exists: Exists,
        grace_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tops = tops
        self._exists = exists
        self._grace_s = grace_s
        self._clock = clock
        self._gone_since: dict[Path, float] = {}
        self._complaints: dict[Path, str] = {}

    def round(self) -> None:
        """Look at all runs once. What cannot be removed stays, is logged, and is tried again."""
        before, self._gone_since = self._gone_since, {}
        complaints, self._complaints = self._complaints, {}
        for place, runs in run_directories.find_namespaces(self._tops):
            for name in ("", *runs):
                path = place.path / name
                if why := self._failed(place, name, before.get(path)):
                    self._complaints[path] = why
                    if why != complaints.get(path):
                        warn("directory.clean_failed", path=str(path), error=why)

    def _failed(self, place: OpenDirectory, run: str, since: float | None) -> str:
        """Clean one run, or finish what was begun (''). Returns why something had to stay."""
        try:
            self._check(place, run, since) if run else _finish(place)
        except (KeepstepError, OSError) as error:
            return str(error)
        return ""

    def _check(self, namespace: OpenDirectory, run: str, since: float | None) -> None:
        now, path = self._clock(), namespace.path / run
        if since is not None:
            self._gone_since[path] = since  # also if the API server does not answer now
        if self._exists(namespace.path.name, run):
            self._gone_since.pop(path, None)
            return
        since = self._gone_since.setdefault(path, now)
        if now - since < self._grace_s:
            return
        try:
            files = remove_run_directory(namespace, run, gone_since=since)
        except StillUsedError:
            self._gone_since[path] = now
            raise
        del self._gone_since[path]
        info("run.removed", path=str(path), files=files)


def run_cleaner(tops: Sequence[Path], *, grace_s: float) -> None:
    """Clean until SIGTERM. Agents of all nodes start at once, and ask the API server one by one."""
    log.configure("agent")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # of process 1, the kernel would drop it
    cleaner = Cleaner(tops, exists=ApiServer().exists, grace_s=grace_s)
    every_s = min(max(_EVERY_S[0], grace_s / 100), _EVERY_S[1])
    time.sleep(random.uniform(0.0, every_s))
    while True:
        cleaner.round()
        time.sleep(every_s)


# --- the API server ------------------------------------------------------------------------------


_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_METADATA: Final = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io"
_TIMEOUT_S: Final = 10.0
_LARGEST_BYTES: Final = 1 << 20


class ApiServer:
    """The API server of this cluster, of which nothing is asked but whether a run exists."""

    def __init__(self, account: Path = _ACCOUNT) -> None:
        self._account = account

    def exists(self, namespace: str, run: str) -> bool:
        """See `Exists`. A 404 counts only if it names this object, because a cluster without
        the CRD also answers 404."""
        where = f"/apis/keepstep.dev/v1alpha1/namespaces/{namespace}/checkpointruns/{run}"
        try:
            status, body = self._get(f"{where}?resourceVersion=0")
        except (OSError, http.client.HTTPException) as error:
            raise StorageError(f"the API server does not say whether it exists: {error}") from error
        if status == 200:
            return True
        if status == 404 and _names(body, run):
            return False
        raise StorageError(f"the API server does not say whether it exists: status {status}")

    def _get(self, path: str) -> tuple[int, bytes]:
        host, port = (os.environ[f"KUBERNETES_SERVICE_{part}"] for part in ("HOST", "PORT"))
        trust = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        token = (self._account / "token").read_text().strip()  # the kubelet replaces it
        connection = http.client.HTTPSConnection(host, int(port), timeout=_TIMEOUT_S, context=trust)
        with contextlib.closing(connection):
            headers = {"Authorization": f"Bearer {token}", "Accept": _METADATA}
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read(_LARGEST_BYTES)


class _NotFound(msgspec.Struct):
    """The API server's Status of a request for an object that does not exist."""

    reason: str
    details: dict[str, Any]


def _names(body: bytes, run: str) -> bool:
    """Whether this answer is about a CheckpointRun of this name that was not found."""
    try:
        found = msgspec.json.decode(body, type=_NotFound)
    except (ValueError, RecursionError):
        return False
    about = found.details.get("kind"), found.details.get("name")
    return found.reason == "NotFound" and about == ("checkpointruns", run)
