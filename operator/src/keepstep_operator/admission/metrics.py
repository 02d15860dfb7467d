"""Every metric of admission. docs/metrics.md lists them, too."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Histogram

from keepstep_operator.admission.reviews import ReviewDecision
from keepstep_operator.serving import metrics_registry

_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)


class AdmissionMetrics:
    """The metrics of one process, with their own registry."""

    def __init__(self) -> None:
        self.registry = metrics_registry()
        self._seconds = Histogram(
            "keepstep_admission_seconds",
            "Time from a review's last byte to its answer",
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self._reviews = Counter(
            "keepstep_admission_reviews",
            "Pods reviewed, by what became of them and why",
            ("result", "reason"),
            registry=self.registry,
        )

    def count_review(self, verdict: ReviewDecision, *, seconds: float) -> None:
        self._seconds.observe(seconds)
        self._reviews.labels(verdict.result.value, verdict.reason).inc()
