"""Every metric of the sidecar, in one table. Computed from `Status` when somebody scrapes.

Imported at the first scrape only: prometheus_client costs 50 ms, and a restart waits for us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from keepstep.wire.status import Status

Samples = Iterator[tuple[tuple[str, ...], float]]


@dataclass(frozen=True)
class Row:
    """One metric: `samples` yields (label values, value) from a status."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...]
    samples: Callable[[Status], Samples]


def _one(value: Callable[[Status], float]) -> Callable[[Status], Samples]:
    return lambda status: iter([((), value(status))])


def _ranks(attribute: str) -> Callable[[Status], Samples]:
    return lambda status: (
        ((str(one.rank),), float(getattr(one, attribute))) for one in status.ranks
    )


def _volumes(value: Callable[..., float]) -> Callable[[Status], Samples]:
    return lambda status: (((one.path,), float(value(one))) for one in status.volumes)


def _depots(value: Callable[..., float]) -> Callable[[Status], Samples]:
    return lambda status: (((str(one.tier), one.where), float(value(one))) for one in status.depots)


def _depot(name: str, kind: Literal["counter", "gauge"], help: str, attribute: str) -> Row:
    labels = ("tier", "where")
    return Row(name, kind, help, labels, _depots(lambda one: getattr(one, attribute)))


def _watermarks(status: Status) -> Samples:
    return (((tier,), float(id.step)) for tier, id in status.watermarks.items())


TABLE = (
    Row("keepstep_saves", "counter", "Images staged", ("rank",), _ranks("saves")),
    Row(
        "keepstep_skipped_saves",
        "counter",
        "Saves that found no slot",
        ("rank",),
        _ranks("skipped"),
    ),
    Row(
        "keepstep_discarded_images",
        "counter",
        "Images of tensors that changed under the copy",
        ("rank",),
        _ranks("discarded"),
    ),
    Row(
        "keepstep_blocked_seconds",
        "counter",
        "Training time that saves took",
        ("rank",),
        _ranks("blocked_s"),
    ),
    Row(
        "keepstep_copy_seconds",
        "counter",
        "Time that copies into slots took",
        ("rank",),
        _ranks("copy_s"),
    ),
    Row(
        "keepstep_trainer_alive",
        "gauge",
        "1 while the rank's trainer holds its lease",
        ("rank",),
        _ranks("alive"),
    ),
    Row(
        "keepstep_slot_bytes", "gauge", "Size of the rank's image", ("rank",), _ranks("slot_bytes")
    ),
    Row(
        "keepstep_slots",
        "gauge",
        "Slots of the rank",
        ("rank",),
        lambda status: (((str(one.rank),), float(len(one.slots))) for one in status.ranks),
    ),
    Row(
        "keepstep_persisted_steps",
        "counter",
        "Steps made durable for all ranks here",
        (),
        _one(lambda status: status.persisted),
    ),
    Row(
        "keepstep_skipped_persists",
        "counter",
        "Due steps that were not made durable",
        (),
        _one(lambda status: status.persist_skipped),
    ),
    Row(
        "keepstep_persist_seconds",
        "counter",
        "Time that writes took, over all ranks",
        (),
        _one(lambda status: status.persist_seconds),
    ),
    Row(
        "keepstep_persist_bytes",
        "counter",
        "Bytes made durable, over all ranks",
        (),
        _one(lambda status: status.persist_bytes),
    ),
    Row(
        "keepstep_evicted_steps",
        "counter",
        "Steps deleted because the volumes were full",
        (),
        _one(lambda status: status.evicted),
    ),
    Row(
        "keepstep_persist_interval_steps",
        "gauge",
        "Steps between two persisted ones",
        (),
        _one(lambda status: status.persist_every),
    ),
    Row(
        "keepstep_watermark_step",
        "gauge",
        "Newest step complete on the tier",
        ("tier",),
        _watermarks,
    ),
    Row(
        "keepstep_epoch",
        "gauge",
        "Number of the epoch, 0 before the first",
        (),
        _one(lambda status: status.epoch.id.number if status.epoch else 0),
    ),
    Row(
        "keepstep_last_commit_timestamp_seconds",
        "gauge",
        "When the newest commit was made",
        (),
        _one(lambda status: status.committed_at or 0.0),
    ),
    Row(
        "keepstep_last_report_timestamp_seconds",
        "gauge",
        "When the operator last answered, 0 without one",
        (),
        _one(lambda status: status.reported_at or 0.0),
    ),
    Row(
        "keepstep_volume_used_bytes",
        "gauge",
        "Bytes that the run takes",
        ("volume",),
        _volumes(lambda one: one.used_bytes),
    ),
    Row(
        "keepstep_volume_free_bytes",
        "gauge",
        "Bytes that are left",
        ("volume",),
        _volumes(lambda one: one.free_bytes),
    ),
    Row(
        "keepstep_volume_failed",
        "gauge",
        "1 after an I/O error",
        ("volume",),
        _volumes(lambda one: bool(one.failed)),
    ),
    Row(
        "keepstep_quarantined_files",
        "gauge",
        "Files in quarantine",
        ("volume",),
        _volumes(lambda one: one.quarantined),
    ),
    _depot("keepstep_depot_sent_shards", "counter", "Shards sent beyond this machine", "sent"),
    _depot("keepstep_depot_sent_bytes", "counter", "Bytes sent beyond this machine", "sent_bytes"),
    _depot("keepstep_depot_sent_seconds", "counter", "Time that sending them took", "sent_seconds"),
    _depot(
        "keepstep_depot_received_bytes", "counter", "Bytes fetched for restores", "received_bytes"
    ),
    _depot(
        "keepstep_depot_received_seconds",
        "counter",
        "Time that fetching them took",
        "received_seconds",
    ),
    _depot("keepstep_depot_failures", "counter", "Attempts that failed", "failures"),
    _depot("keepstep_depot_backlog_shards", "gauge", "Shards that are not there yet", "backlog"),
    _depot(
        "keepstep_depot_behind_seconds",
        "gauge",
        "For how long the oldest of them waits",
        "behind_s",
    ),
    Row(
        "keepstep_depot_trouble",
        "gauge",
        "1 when the last attempt failed",
        ("tier", "where"),
        _depots(lambda one: bool(one.trouble)),
    ),
    Row(
        "keepstep_window_read_bytes",
        "counter",
        "Bytes read for restores into another layout",
        ("tier",),
        lambda status: (((tier,), float(size)) for tier, size in status.window_bytes.items()),
    ),
    Row(
        "keepstep_window_shared_bytes",
        "counter",
        "Bytes that ranks got from the read of another one, instead",
        (),
        _one(lambda status: status.window_shared_bytes),
    ),
    Row(
        "keepstep_warnings",
        "gauge",
        "Warnings that `keepstep status` shows",
        (),
        _one(lambda status: len(status.warnings)),
    ),
)
"""docs/operations.md lists the same table."""


class _Scrape(Collector):
    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        for row in TABLE:
            family = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
            metric = family(row.name, row.help, labels=row.labels)
            for labels, value in row.samples(self._status):
                metric.add_metric(labels, value)
            yield metric


def render(status: Status) -> bytes:
    """The scrape, in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Scrape(status))
    return generate_latest(registry)
