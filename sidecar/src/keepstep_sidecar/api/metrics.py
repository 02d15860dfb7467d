"""Every metric of the sidecar, in one table. Values are computed from `Status` at each scrape.

Imported only at the first scrape: prometheus_client costs 50 ms, and a restart waits for the
sidecar.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from keepstep.steps import Epoch, StepId
from keepstep.wire.status import Status

_TABLE = """
saves                           counter rank.saves                    Images staged
skipped_saves                   counter rank.skipped                  Saves that found no slot
discarded_images                counter rank.discarded                Images of tensors that changed under the copy
blocked_seconds                 counter rank.blocked_s                Training time that saves took
copy_seconds                    counter rank.copy_s                   Time that copies into slots took
trainer_alive                   gauge   rank.alive                    1 while the rank's trainer holds its lease
slot_bytes                      gauge   rank.slot_bytes               Size of the rank's image
slots                           gauge   rank.slots                    Slots of the rank
persisted_steps                 counter status.persisted              Steps made durable for all ranks here
skipped_persists                counter status.persist_skipped        Due steps that were not made durable
persist_seconds                 counter status.persist_seconds        Time that writes took, over all ranks
persist_bytes                   counter status.persist_bytes          Bytes made durable, over all ranks
evicted_steps                   counter status.evicted                Steps deleted because the volumes were full
persist_interval_steps          gauge   status.persist_every          Steps between two persisted ones
watermark_step                  gauge   map.watermarks                Newest step complete on the tier
epoch                           gauge   status.epoch                  Number of the epoch, 0 before the first
last_commit_timestamp_seconds   gauge   status.committed_at           When the newest commit was made
last_report_timestamp_seconds   gauge   status.reported_at            When the run's leader last answered
volume_used_bytes               gauge   volume.used_bytes             Bytes that the run takes
volume_free_bytes               gauge   volume.free_bytes             Bytes that are left
volume_failed                   gauge   volume.failed                 1 after an I/O error
quarantined_files               gauge   volume.quarantined            Files in quarantine
tier_sent_shards                counter tier.sent                    Shards sent beyond this machine
tier_sent_bytes                 counter tier.sent_bytes              Bytes sent beyond this machine
tier_sent_seconds               counter tier.sent_seconds            Time that sending them took
tier_received_bytes             counter tier.received_bytes          Bytes fetched for restores
tier_received_seconds           counter tier.received_seconds        Time that fetching them took
tier_shared_bytes               counter tier.shared_bytes            Bytes of copies kept here that share the blocks of own shards
tier_failures                   counter tier.failures                Attempts that failed
tier_backlog_shards             gauge   tier.backlog                 Shards that are not there yet
tier_behind_seconds             gauge   tier.behind_s                For how long the oldest of them waits
tier_trouble                    gauge   tier.trouble                 1 when the last attempt failed
window_read_bytes               counter map.window_bytes            Bytes read for restores into another layout
window_shared_bytes             counter status.window_shared_bytes    Bytes that ranks got from the read of another one, instead
warnings                        gauge   status.warnings               Warnings that `keepstep status` shows
goodput_ratio                   gauge   goodput.ratio                 Useful step time over wall time, over all lives of the run here
goodput_seconds                 gauge   bucket.goodput                Wall time of the run here, productive and by bucket of badput
interruptions                   gauge   goodput.interruptions         Interruptions of the run here
"""  # noqa: E501
"""Name, kind, scope and attribute, help. docs/metrics.md is generated from this table."""

_LABELS = {"rank": ("rank",), "volume": ("volume",), "map": ("tier",), "status": ()}
_LABELS |= {"tier": ("tier", "where"), "goodput": (), "bucket": ("bucket",)}


@dataclass(frozen=True)
class StatusMetric:
    """One metric. `scope`: what gives one sample each, namely every `rank`, `volume`, `tier` or
    `bucket`, or every tier of a `map` of the status; or there is one sample of the `goodput` (if
    known) or of the whole `status`. `attribute`: of the scope's object."""

    name: str
    kind: str
    scope: str
    attribute: str
    help: str

    @property
    def labels(self) -> tuple[str, ...]:
        return _LABELS[self.scope]

    def samples(self, status: Status) -> Iterator[tuple[tuple[str, ...], float]]:
        """Pairs of (label values, value)."""
        get = attrgetter(self.attribute)
        if self.scope == "rank":
            yield from (((str(rank.rank),), _number(get(rank))) for rank in status.ranks)
        elif self.scope == "volume":
            yield from (((volume.path,), _number(get(volume))) for volume in status.volumes)
        elif self.scope == "tier":
            for tier, tier_status in status.tiers.items():
                yield (tier, tier_status.where), _number(get(tier_status))
        elif self.scope == "bucket":
            by_bucket = {} if status.goodput is None else status.goodput.seconds
            yield from (((bucket,), seconds) for bucket, seconds in by_bucket.items())
        elif self.scope == "goodput":
            if status.goodput is not None:
                yield (), _number(get(status.goodput))
        elif self.scope == "map":
            tiers: Mapping[str, Any] = get(status)
            yield from (((tier,), _number(value)) for tier, value in tiers.items())
        else:
            yield (), _number(get(status))


def _number(value: Any) -> float:
    """A sample's value: 0 for None, 1 for a text that is not empty, the number of items of a
    collection."""
    if value is None:
        return 0.0
    if isinstance(value, StepId):
        return float(value.step)
    if isinstance(value, Epoch):
        return float(value.id.number)
    if isinstance(value, str):
        return float(bool(value))
    return float(len(value) if isinstance(value, Sized) else value)


TABLE = tuple(
    StatusMetric(f"keepstep_{name}", kind, of.partition(".")[0], of.partition(".")[2], text)
    for name, kind, of, text in (line.split(maxsplit=3) for line in _TABLE.strip().splitlines())
)


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


def render_metrics(status: Status) -> bytes:
    """The metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Scrape(status))
    return generate_latest(registry)
