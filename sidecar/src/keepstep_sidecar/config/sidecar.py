"""The configuration of a sidecar, each setting declared once. Constant while the sidecar lives."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import ssl
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

import click

from keepstep.core.retention import Retention
from keepstep.core.schedule import round_up_to_grid
from keepstep.errors import UsageError
from keepstep.steps import Epoch, StepId, StrEnum
from keepstep.wire.run_reports import PATH as RUNS_PATH
from keepstep_sidecar.config.settings import (
    ADDRESS,
    AUTO,
    DIR,
    DURATION,
    FILE,
    PATH,
    PEM,
    PLACE,
    POSITIVE,
    RATE,
    REQUIRED,
    SIZE,
    SPAN,
    STEP,
    SWITCH,
    TEXT,
    URL,
    WHOLE_OR_AUTO,
    Command,
    Setting,
    enum_kind,
    integer_kind,
    parse_duration,
    read_file,
    setting,
    settings_of,
)

# --- the archive -----------------------------------------------------------------------------


SCHEMES = ("s3", "gs", "az", "file")
_OBJECT_STORES = SCHEMES[:3]


@dataclass(frozen=True, kw_only=True)
class ArchiveConfig:
    """`url`: `s3://bucket/prefix`, `gs://...`, `az://container/prefix`, `file:///dir` or a path.

    `every`: steps that are multiples of it are sent (see `step_interval`). `endpoint` and
    `region`: of an S3 store that is not Amazon's. Credentials are never configured here. They come
    from the environment, in the variables of each store (AWS_ACCESS_KEY_ID,
    GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY), or from the machine's own identity.
    """

    url: str
    every: int = 1000
    endpoint: str | None = None
    region: str | None = None
    retention: Retention = field(default_factory=lambda: Retention(last=3))

    def __post_init__(self) -> None:
        """Raises UsageError when the values cannot work together."""
        if self.every < 1:
            raise UsageError(f"--archive-every {self.every}: starts at 1")
        if self.scheme not in SCHEMES:
            known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise UsageError(f"--archive {self.url}: not one of {known} or a directory")
        if self.scheme in _OBJECT_STORES and not urlsplit(self.url).netloc:
            raise UsageError(
                f"--archive {self.url}: names no bucket, like {self.scheme}://ckpt/gpt"
            )
        if self.scheme == "file" and not self.directory.is_absolute():
            raise UsageError(f"--archive {self.url}: write it like file:///mnt/archive")
        if self.endpoint is not None and self.scheme != "s3":
            raise UsageError("--archive-endpoint goes with an s3:// archive only")

    @property
    def scheme(self) -> str:
        """The kind of store. A path without a scheme is a directory (`file`)."""
        return self.url.partition("://")[0] if "://" in self.url else "file"

    @property
    def directory(self) -> Path:
        """The directory of the archive. For `file` only."""
        if "://" not in self.url:
            return Path(self.url).absolute()
        parts = urlsplit(self.url)
        return Path(parts.netloc + parts.path)

    @property
    def bucket(self) -> str:
        """The bucket or container. For object stores only."""
        return urlsplit(self.url).netloc

    @property
    def prefix(self) -> str:
        """What all names in the bucket begin with, without leading and trailing slashes."""
        return urlsplit(self.url).path.strip("/")

    def step_interval(self, persist_base: int) -> int:
        """Multiples of this many steps are sent: `every`, rounded up to the grid of durable
        steps."""
        return round_up_to_grid(self.every, persist_base)


# --- peers -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """`listen`, `advertise`: `host:port`. `replicas`: copies of each shard on other pods.

    `fixed`: no other port will do, because members find their leader there. `bytes_per_second`:
    limit of all copies that are sent; a restore is never held back.
    """

    listen: str
    advertise: str = ""
    replicas: int = 1
    fixed: bool = False
    bytes_per_second: int | None = None

    def __post_init__(self) -> None:
        """Raises UsageError when the values cannot work together."""
        for address in filter(None, (self.listen, self.advertise)):
            split_address(address)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`. Raises UsageError."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{address!r} is no address: expected like 10.0.0.7:9465")
    return host.removeprefix("[").removesuffix("]"), int(port)


# --- the step to go on from ------------------------------------------------------------------


NEWEST = "latest"

_NUMBER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, kw_only=True)
class RollbackRequest:
    """A step's `number` or its full `id`. `since`: the newest epoch when the wish was made."""

    number: int | None = None
    id: StepId | None = None
    since: int = 0

    def names(self, step_id: StepId) -> bool:
        return step_id == self.id if self.id is not None else step_id.step == self.number

    def __str__(self) -> str:
        return str(self.number if self.id is None else self.id)


@dataclass(frozen=True, kw_only=True)
class Fork:
    """`run`: the other run. The step is given by `number` or by full `id`; without both it is the
    newest step there."""

    run: str
    number: int | None = None
    id: StepId | None = None

    def filter_matching_steps(
        self, archived: Iterable[StepId], alive: Collection[StepId], epochs: Iterable[Epoch]
    ) -> list[StepId]:
        """Which of the other run's archived steps may be the chosen one. `alive`: steps that no
        later life of that run left behind; any other step must be named by its full id. `epochs`:
        of this run. An epoch that began from the other run says which step it was.
        """
        began = {epoch.parent for epoch in epochs if epoch.origin == self.run}
        meant = [step_id for step_id in archived if self._means(step_id, alive)]
        if self.number is not None:
            meant = [max(meant)] if meant else []
        return [step_id for step_id in meant if step_id in began] if began else meant

    def _means(self, step_id: StepId, alive: Collection[StepId]) -> bool:
        if self.id is not None:
            return step_id == self.id
        return step_id in alive and self.number in (None, step_id.step)

    def __str__(self) -> str:
        named = self.id if self.id is not None else self.number
        return f"{self.run}/{NEWEST if named is None else named}"


def parse_restore_from(text: str, *, since: int = 0) -> RollbackRequest | Fork:
    """`STEP`: a number or an id. `RUN/STEP`: also `latest`. Raises UsageError for all else."""
    run, slash, step = text.rpartition("/")
    if slash and not _RUN.fullmatch(run):
        raise UsageError(
            f"--restore-from {text}: {run!r} cannot name a run of the same archive; to go back to a"
            " step of this run, leave RUN/ out (on Kubernetes: spec.restoreFrom of its"
            " CheckpointRun)"
        )
    number: int | None = None
    step_id: StepId | None = None
    try:
        if _NUMBER.fullmatch(step):
            number = int(step)
        elif not slash or step != NEWEST:
            step_id = StepId.parse(step)
    except ValueError as error:
        raise UsageError(
            f"--restore-from {text}: give a step's number or its id, as `keepstep steps` shows"
            f" them, or RUN/STEP of another run, whose STEP may be {NEWEST}, too"
        ) from error
    if slash:
        return Fork(run=run, number=number, id=step_id)
    return RollbackRequest(number=number, id=step_id, since=since)


# --- all settings ----------------------------------------------------------------------------


IO_THREADS: Final = 16
"""On huge pages, so many chunks at a time are written as fast as the drive can; 4 take a tenth
longer. On small pages there is no difference."""

PEER_PORT: Final = 9465
"""Where a machine of a run serves the others, unless it is told otherwise."""

_LONGEST_SOCKET_PATH: Final = 107
"""The size of a unix socket's `sun_path` without its closing zero (unix(7))."""

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


class OnLoss(StrEnum):
    """What a run does when a part of every step is lost. `WAIT`: the storage may come back.
    `RESTART`: what a pod kept goes with that pod for good, so the run begins again."""

    WAIT = "wait"
    RESTART = "restart"


def check_run(name: str) -> None:
    """Raises UsageError unless `name` can name a run, and so a directory on each volume."""
    if not _RUN.fullmatch(name):
        raise UsageError(
            f"--run {name!r} cannot name a run: use letters, digits, '.', '_' and '-', and begin"
            " with a letter or digit"
        )


def check_apart(volumes: Iterable[Path], run: str, archive: ArchiveConfig | None) -> None:
    """Raises UsageError if an archive and a volume, or the runs' directories of two volumes, are
    one place, or one lies in the other: what is kept of one would be deleted as the other's."""
    places = [Path(os.path.realpath(volume)) for volume in volumes]
    for number, place in enumerate(places):
        for other in places[number + 1 :]:
            if _overlap(place / run, other / run):
                raise UsageError(
                    f"--volume {place} and --volume {other}: the run's directories there are one,"
                    " or one in the other; name directories apart from each other"
                )
    if archive is None or archive.scheme != "file":
        return
    far = Path(os.path.realpath(archive.directory))
    for place in places:
        if _overlap(place, far):
            raise UsageError(
                f"--archive {far} and the volume {place} are one place, or one lies in the other:"
                " the archive is to outlive the volume, and each would delete the other's steps;"
                " name a directory apart from it, best on another drive"
            )


def _overlap(path: Path, other: Path) -> bool:
    first, second = ([_identity(at) for at in (path, *path.parents)] for path in (path, other))
    return first[0] in second or second[0] in first


def _identity(path: Path) -> tuple[int | str, ...]:
    """Device and inode, which a bind mount shares with what it shows. Of what is not there yet:
    those of the nearest directory above, and the names below."""
    try:
        found = path.stat()
    except OSError:
        return (*_identity(path.parent), path.name)
    return found.st_dev, found.st_ino


@dataclass(frozen=True, kw_only=True)
class OperatorAccess:
    """How an operator is reached: it signs, and the run's leader reports to it.

    `ca`: PEM text, the only trusted authorities until the operator names others. Those are kept in
    `ca_file` for the next start. `token_file`: read anew for each report, because Kubernetes
    replaces it.
    """

    url: str
    ca: str = field(repr=False)
    token_file: Path
    ca_file: Path | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for an address to which the token must not be sent."""
        if not self.url.startswith("https://"):
            raise UsageError(f"--report-url {self.url}: the token goes over https:// only")

    @property
    def address(self) -> str:
        """The URL for reports of the run. A URL without a path gets the usual path."""
        without = urlsplit(self.url).path in ("", "/")
        return self.url.rstrip("/") + RUNS_PATH if without else self.url

    def token(self) -> str:
        """The token now. Raises UsageError."""
        try:
            token = self.token_file.read_text().strip()
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read the token: {error}") from error
        if not token or not token.isprintable() or " " in token:
            raise UsageError(f"{self.token_file} holds no token")
        return token

    def authorities(self) -> str:
        """The authorities that are trusted now, in PEM."""
        if self.ca_file is not None:
            with contextlib.suppress(OSError, ValueError):
                return self.ca_file.read_text()
        return self.ca

    def make_ssl_context(self) -> ssl.SSLContext:
        """A context that trusts these authorities and no others. Raises UsageError."""
        try:
            return trusting_context(self.authorities())
        except UsageError:  # a partial file: its node lost power
            return trusting_context(self.ca)

    def trust_authorities(self, authorities: str) -> None:
        """Trust these authorities from now on, in place of all others. Raises UsageError, or
        OSError when they could not be stored."""
        trusting_context(authorities)
        if self.ca_file is not None:
            written = self.ca_file.with_suffix(".new")
            written.write_text(authorities)
            written.replace(self.ca_file)


def trusting_context(ca: str) -> ssl.SSLContext:
    """A context that trusts these authorities and no others. Raises UsageError."""
    try:
        return ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cadata=ca)
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(f"--report-ca holds no certificate in PEM: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings, and what follows from them. This run's root on a volume is `<volume>/<run>`."""

    # fmt: off
    run: str = setting(TEXT, REQUIRED, "Name of the run.")
    memory_dir: Path = setting(
        DIR, REQUIRED, "Directory in shared memory, for slots and the socket.", for_run=False
    )
    volumes: tuple[Path, ...] = setting(
        DIR, REQUIRED,
        "Directory on a local drive for durable steps; may be repeated: ranks are spread over"
        " them.",
        several=True,
    )
    slots: int | None = setting(
        integer_kind(1), None,
        "Images of each rank in memory.  [default: as many as a restart needs to find a common step"
        " there: 3 if all ranks are on this machine, else 4; the last of them is made when a write"
        " takes longer than a step]  1: only durable steps are staged, and a restart goes back to"
        " the last of them.",
    )
    memory_limit_bytes: int | None = setting(
        SIZE, None, "Memory for all slots, like 32Gi.  [default: what the shared memory has]"
    )
    huge_pages_dir: Path | None = setting(
        DIR, None,
        "Directory on hugetlbfs, of this run alone: slots are made there while pages of 2 MiB are"
        " free.",
        for_run=False,
    )
    small_pages: bool = setting(
        SWITCH, False, "Make no slot of huge pages, even where some are free."
    )
    stage_every: int | str = setting(
        WHOLE_OR_AUTO, 1,
        "Stage every Nth step in memory; auto: as many as cost 1 % of the training time.",
    )
    persist_every: int | None = setting(
        integer_kind(1), None,
        "Make every Nth step durable.  [default: as many as drives, failures and lost time allow]",
    )
    drive_writes_per_day: float | None = setting(
        POSITIVE, None,
        "Without --persist-every: how often a day the drives may be written in full, like 0.3.",
    )
    keep: int = setting(integer_kind(1), 2, "Newest committed steps that stay on the volumes.")
    keep_every: str | None = setting(
        SPAN, None, "Keep every Kth step there, too, or the first of every DURATION, like 6h."
    )
    capacity_bytes: int | None = setting(
        SIZE, None, "Limit of each volume, like 400Gi.  [default: the drive]"
    )
    archive: str | None = setting(
        PLACE, None,
        "Where steps outlive every machine: s3://bucket/prefix, gs://..., az://... or a directory"
        " that others see, too. Credentials come from the environment.",
    )
    archive_every: int = setting(integer_kind(1), 1000, "Archive every Nth step.")
    archive_keep: int = setting(integer_kind(1), 3, "Newest steps that stay in the archive.")
    archive_keep_every: str | None = setting(
        SPAN, None, "Keep every Kth step, too, or the first of every DURATION, like 6h."
    )
    archive_endpoint: str | None = setting(
        URL, None, "Address of an S3 store that is not Amazon's, like https://s3.example.com."
    )
    archive_region: str | None = setting(TEXT, None, "Region of the S3 store.")
    nodes: int = setting(
        integer_kind(1), 1, "How many machines the run has; under srun, as many as the step has."
    )
    node_rank: int = setting(
        integer_kind(0), 0, "Number of this machine, from 0; under srun, as Slurm counts."
    )
    leader: str | None = setting(
        ADDRESS, None,
        "Address of machine 0, whose sidecar leads the run; under srun, the step's first node.",
    )
    secret_file: Path | None = setting(
        PATH, None,
        "The secret by which the machines know each other (`keepstep secret`), of mode 0600."
        "  [default: the variable KEEPSTEP_SECRET, which holds the secret itself]",
    )
    secret_id: str | None = setting(
        TEXT, None,
        "Names the secret, so that a sidecar with another secret is replaced.",
        for_run=False,
        hidden=True,
    )
    peer_listen: str | None = setting(
        ADDRESS, None,
        "Address at which this machine serves the others.  [default: on several machines, port"
        " 9465; on machine 0 that of --leader]",
    )
    peer_advertise: str | None = setting(
        ADDRESS, None, "Where they find it, if that is elsewhere."
    )
    peer_replicas: int = setting(
        integer_kind(0), 1, "Copies of each shard on other machines, if no operator chooses them."
    )
    peer_bytes_per_second: int | None = setting(
        RATE, None, "Limit of all copies that are sent, like 500Mi."
    )
    io_threads: int = setting(
        integer_kind(1), IO_THREADS, "Chunks under way at a time at each volume."
    )
    bytes_per_second: int | None = setting(RATE, None, "Limit of all writes together, like 500Mi.")
    flush_timeout_s: float = setting(DURATION, 25.0, "How long a flush may take.")
    linger_s: float | None = setting(
        DURATION, None, "How long memory stays when no trainer is there, like 15m."
    )
    owner_pid: int | None = setting(
        integer_kind(1), None, "While this process lives, --linger does not count.", for_run=False
    )
    pod: str = setting(TEXT, "", "UID of this pod.", for_run=False)
    node: str = setting(TEXT, "", "Name of the node that this pod is on.", for_run=False)
    report_url: str | None = setting(
        URL, None, "Where the run's leader reports to an operator, https://...", for_run=False
    )
    report_ca: str | None = setting(
        PEM, None, "The only authorities that are trusted for --report-url.", for_run=False
    )
    report_ca_file: Path | None = setting(
        PATH, None, "Where authorities are kept that the operator names later.", for_run=False
    )
    report_token_file: Path | None = setting(
        PATH, None, "Token for --report-url; read anew for each report.", for_run=False
    )
    restore_from: str | None = setting(
        STEP, None,
        "Go back to this step, a number or an id of `keepstep steps`, once: later steps are dead"
        " then, and further restarts go on from the newest one. RUN/STEP: begin as a fork of"
        " another run, from its step (or `latest`) in the archive; a run with steps of its own"
        " goes on from these.",
    )
    restore_since: int = setting(
        integer_kind(0), 0,
        "The newest epoch when --restore-from was asked for.",
        for_run=False,
        hidden=True,
    )
    on_loss: OnLoss = setting(
        enum_kind(OnLoss), OnLoss.WAIT,
        "What to do when a part of every step is lost: wait for it, or begin again, because what a"
        " pod kept here goes with that pod for good.",
        for_run=False,
    )
    metrics_port: int | None = setting(
        integer_kind(1, 65535), None,
        "TCP port of /metrics and /healthz.  [default: the socket only]",
    )
    ui_port: int | None = setting(
        integer_kind(1, 65535), None,
        "TCP port on 127.0.0.1 of the run's page, for `kubectl keepstep ui`; KEEPSTEP_UI_SECRET"
        " must be set.",
        for_run=False,
    )
    # fmt: on

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Config:
        """A configuration from values by field, as `given_values` returns them. Raises
        UsageError."""
        for entry in SETTINGS:
            if entry.required and not values.get(entry.field):
                raise UsageError(f"Missing option '{entry.flag}' (or {entry.variable}).")
        return cls(**values)

    def __post_init__(self) -> None:
        """Raises UsageError when the values cannot work together."""
        check_run(self.run)
        if not self.volumes:
            raise UsageError("a sidecar needs at least one volume: pass --volume DIR")
        archive, peers = self.archive_config, self.peer_settings
        reporting, fork = self.reporting, self.fork
        if self.peer_listen is not None and peers is None:
            raise UsageError("--peer-listen goes with --nodes: one machine alone has no peers")
        self._check_leader(operated=reporting is not None)
        if fork is not None and archive is None:
            raise UsageError(
                f"--restore-from {fork}: a step of another run comes from the archive that both"
                " share; give --archive"
            )
        check_apart(self.volumes, self.run, archive)
        if len(os.fsencode(self.socket)) > _LONGEST_SOCKET_PATH:
            raise UsageError(
                f"{self.socket}: a unix socket's path has at most {_LONGEST_SOCKET_PATH} bytes;"
                " choose a shorter --memory-dir"
            )

    def _check_leader(self, *, operated: bool) -> None:
        if not operated and self.node_rank >= self.nodes:
            raise UsageError(
                f"--node-rank {self.node_rank}: of {self.nodes} nodes the last has"
                f" --node-rank {self.nodes - 1}"
            )
        if self.alone:
            return
        if self.leader is None:
            why = "--report-url" if operated else f"--nodes {self.nodes}"
            raise UsageError(f"{why}: say where machine 0 is found, with --leader HOST:PORT")
        split_address(self.leader)

    @property
    def alone(self) -> bool:
        """Whether the run has no other machine. With an operator, `nodes` does not count: the
        operator knows which pods there are."""
        return self.nodes == 1 and self.report_url is None

    @property
    def socket(self) -> Path:
        """The socket on which trainers and the `keepstep` command reach this sidecar."""
        return self.memory_dir / "sidecar.sock"

    @property
    def persist_grid_interval(self) -> int:
        """A step is persisted every this many steps, or less often if no interval was chosen. Only
        staged steps can be persisted, so the persist grid is a multiple of the stage grid."""
        return round_up_to_grid(self.persist_every or 1, self.base_stage_interval)

    @property
    def base_stage_interval(self) -> int:
        """Steps from one staged step to the next, or more if a save's cost decides."""
        return 1 if isinstance(self.stage_every, str) else self.stage_every

    @property
    def stages_by_cost(self) -> bool:
        """Whether a save's cost decides which steps are staged (`core.staging_interval`)."""
        return self.stage_every == AUTO

    @property
    def milestones(self) -> frozenset[int]:
        """Steps at multiples of these become durable at any interval: they are to be archived or
        kept. Empty where a person chose which steps become durable."""
        if self.persist_every is not None:
            return frozenset()
        archived = self.archive_config and self.archive_config.step_interval(
            self.persist_grid_interval
        )
        return frozenset(steps for steps in (archived, self.retention.every_steps) if steps)

    @property
    def durable_step_divisor(self) -> int | None:
        """All steps that a person wants to be durable are multiples of this; None: any may be."""
        return math.gcd(self.persist_every or 0, *self.milestones) or None

    @cached_property
    def retention(self) -> Retention:
        """Which committed steps stay on local volumes."""
        return _retention(self.keep, self.keep_every)

    @cached_property
    def archive_config(self) -> ArchiveConfig | None:
        """The archive, where steps outlive the machine; None without one."""
        if self.archive is None:
            return None
        return ArchiveConfig(
            url=self.archive,
            every=self.archive_every,
            endpoint=self.archive_endpoint,
            region=self.archive_region,
            retention=_retention(self.archive_keep, self.archive_keep_every),
        )

    @cached_property
    def peer_settings(self) -> PeerSettings | None:
        """Which pods keep copies for which; None on a machine alone."""
        if self.alone:
            return None
        leads = self.node_rank == 0
        port = split_address(self.leader)[1] if leads and self.leader else PEER_PORT
        return PeerSettings(
            listen=self.peer_listen or f"0.0.0.0:{port}",
            advertise=self.peer_advertise or (self.leader if leads and self.leader else ""),
            replicas=self.peer_replicas,
            fixed=leads,
            bytes_per_second=self.peer_bytes_per_second,
        )

    @cached_property
    def reporting(self) -> OperatorAccess | None:
        """Where to report; None without an operator."""
        if self.report_url is None:
            return None
        if self.report_ca is None or self.report_token_file is None:
            raise UsageError("--report-url needs --report-ca and --report-token-file")
        return OperatorAccess(
            url=self.report_url,
            ca=self.report_ca,
            token_file=self.report_token_file,
            ca_file=self.report_ca_file,
        )

    @property
    def fresh_start_command(self) -> str:
        """The command by which a person has this run begin again at step 0."""
        if self.report_url is None:
            return "`keepstep run --run NAME -- ...` with a new name; the steps of this run stay"
        return f"`kubectl annotate --overwrite ckrun {self.run} keepstep.dev/fresh-start=allow`"

    @property
    def rollback_request(self) -> RollbackRequest | None:
        """The step from which the next epoch is to go on."""
        return self._start if isinstance(self._start, RollbackRequest) else None

    @property
    def fork(self) -> Fork | None:
        """The step of another run from which this run begins."""
        return self._start if isinstance(self._start, Fork) else None

    @cached_property
    def _start(self) -> RollbackRequest | Fork | None:
        text = (self.restore_from or "").removeprefix(f"{self.run}/")
        return parse_restore_from(text, since=self.restore_since) if text else None


SETTINGS: Final = settings_of(Config)

_BESIDE: Final = ("home",)
"""What `keepstep run` writes for itself into its sidecar's file (see cli.run_dir)."""


def setting_options(settings: Iterable[Setting], **shown: str) -> Callable[[Command], Command]:
    """Add `--config FILE` and the flags of `settings`. The command gets one argument `values`: what
    flags, environment and file say, by field. `shown`: see `Setting.option`."""
    made = [_config_option, *(entry.option(shown.get(entry.name)) for entry in settings)]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_values(*arguments: Any, **others: Any) -> Any:
            values = click.get_current_context().obj
            return command(*arguments, values=values, **others)

        decorated: Any = with_values
        for option in reversed(made):
            decorated = option(decorated)
        return cast("Command", decorated)

    return decorate


def _load(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    ctx.ensure_object(dict)
    if path is not None:
        ctx.meta[FILE], ctx.default_map = path, read_file(path, SETTINGS, beside=_BESIDE)


_config_option: Final = click.option(
    "--config",
    envvar="KEEPSTEP_CONFIG",
    type=click.Path(path_type=Path),
    metavar="FILE",
    is_eager=True,
    expose_value=False,
    callback=_load,
    help="TOML with any of these options, like persist_every = 10. Flags and the environment"
    " (KEEPSTEP_PERSIST_EVERY) count before it.",
)


@click.command()
@setting_options(SETTINGS)
def _values(values: dict[str, Any]) -> dict[str, Any]:
    return values


def given_values(*flags: str) -> dict[str, Any]:
    """The values of `flags`, the environment and a file, by field. Raises UsageError."""
    values: dict[str, Any] = _values.main(flags, standalone_mode=False)
    return values


def _retention(last: int, every: str | None) -> Retention:
    if every is None:
        return Retention(last=last)
    if every.isdecimal():
        return Retention(last=last, every_steps=int(every))
    return Retention(last=last, every_s=parse_duration(every))
