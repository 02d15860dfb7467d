"""Restores and saves as OpenTelemetry, W&B, TensorBoard and MLflow show them, with the packages
themselves; none of them can hold up a training."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import keepstep
from keepstep import tracing
from keepstep.errors import UsageError
from keepstep.integrations.notes import note_restore
from keepstep.steps import Tier
from tests.harness import eventually

RESTORED = keepstep.Restored(step=41, epoch=2, tier=Tier.LOCAL, seconds=0.1, bytes=1000)


class Exporter(SpanExporter):
    """What the only provider of this process exports to; a test says what that does."""

    def __init__(self) -> None:
        self.memory = InMemorySpanExporter()
        self.trouble = threading.Event()
        self.hangs = threading.Event()
        self.goes_on = threading.Event()

    def export(self, spans: tuple[ReadableSpan, ...]) -> SpanExportResult:
        if self.trouble.is_set():
            self.hangs.set()
            assert self.goes_on.wait(60)
            raise ConnectionError("the collector is away")
        return self.memory.export(spans)


@pytest.fixture(scope="session")
def provider() -> Exporter:
    """A process has one provider; a worker may come back to this module, or another set it."""
    exporter = Exporter()
    given = trace.get_tracer_provider()
    if not isinstance(given, TracerProvider):
        given = TracerProvider()
        trace.set_tracer_provider(given)
    # it exports in the thread that ends a span
    given.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


@pytest.fixture
def exporter(provider: Exporter) -> Iterator[Exporter]:
    provider.memory.clear()
    for event in (provider.trouble, provider.hangs, provider.goes_on):
        event.clear()
    yield provider
    provider.trouble.clear()
    provider.goes_on.set()


def checkpointer(directory: Path) -> keepstep.Checkpointer:
    model = torch.nn.Linear(4, 4)
    return keepstep.Checkpointer({"model": model}, dir=directory, run="seen")


def spans(exporter: Exporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.memory.get_finished_spans() if span.name == name]


def test_saves_and_restores_are_child_spans_of_the_current_opentelemetry_span(
    exporter: Exporter, tmp_path: Path
) -> None:
    first = checkpointer(tmp_path)
    assert first.restore() is None
    with trace.get_tracer("script").start_as_current_span("step") as step:
        assert first.save(0)
    assert first.save(1)
    first.close()
    second = checkpointer(tmp_path)
    began = time.time_ns()
    at = second.restore()
    assert at is not None
    second.close()
    eventually(lambda: len(spans(exporter, "checkpoint_load")) == 1)
    (load,), saves = spans(exporter, "checkpoint_load"), spans(exporter, "checkpoint_save")
    assert load.attributes is not None
    assert dict(load.attributes) == {
        "keepstep.step": at.step,
        "keepstep.epoch": at.epoch,
        "keepstep.tier": str(at.tier),
        "keepstep.bytes": at.bytes,
        "keepstep.rank": 0,
    }
    assert load.start_time is not None
    assert load.end_time is not None
    assert began - 10**7 < load.start_time < load.end_time < time.time_ns()
    assert [(save.attributes or {})["keepstep.step"] for save in saves] == [0, 1]
    assert saves[0].parent is not None
    assert saves[0].parent.span_id == step.get_span_context().span_id
    assert saves[1].parent is None


def test_a_hung_or_failing_exporter_does_not_delay_saves(
    exporter: Exporter, tmp_path: Path
) -> None:
    kept = checkpointer(tmp_path)
    kept.restore()
    exporter.trouble.set()
    assert kept.save(0)
    assert exporter.hangs.wait(30)
    for number in range(600):  # more than wait to be handed over
        tracing.record_span("checkpoint_save", 0.001, step=number)
    assert kept.save(1)  # while the exporter hangs
    kept.wait(1, "staged", timeout=60)
    kept.close()
    assert exporter.memory.get_finished_spans() == ()
    exporter.trouble.clear()
    exporter.goes_on.set()
    eventually(lambda: len(spans(exporter, "checkpoint_save")) >= 200)
    assert len(spans(exporter, "checkpoint_save")) < 300  # the others were dropped


def test_importing_the_checkpointer_does_not_import_opentelemetry() -> None:
    code = "import sys, keepstep.checkpointer; print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# --- notes -----------------------------------------------------------------------------------


def test_a_restore_is_recorded_in_tensorboard(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path))
    assert note_restore(RESTORED, writer) is RESTORED

    def noted() -> bool:
        writer.flush()
        events = EventAccumulator(str(tmp_path)).Reload()
        return "keepstep/restored_step" in events.Tags()["scalars"]

    eventually(noted)
    (event,) = EventAccumulator(str(tmp_path)).Reload().Scalars("keepstep/restored_step")
    assert (event.step, event.value) == (41, 41.0)
    writer.close()


def test_a_restore_is_recorded_in_wandb_without_advancing_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=str(tmp_path), project="keepstep")
    note_restore(RESTORED, run, None)
    eventually(lambda: run.summary.get("keepstep/restored") == "step 41 of epoch 2: local")
    assert run.summary["keepstep/restored_step"] == 41
    assert run.step == 0
    run.log({"loss": 1.0})
    assert run.step == 1
    assert run.summary["loss"] == 1.0
    run.finish()


def test_a_restore_is_recorded_in_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="not in this environment: it is large")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path / 'runs'}")
    with mlflow.start_run() as run:
        note_restore(RESTORED, mlflow)
        # a file that is being written is empty for a moment, and mlflow's reader refuses it
        eventually(lambda: not any(thread.name == "note" for thread in threading.enumerate()))
        client = mlflow.MlflowClient()
        assert "keepstep.restored" in client.get_run(run.info.run_id).data.tags
        (metric,) = client.get_metric_history(run.info.run_id, "keepstep/restored_step")
        assert (metric.step, metric.value) == (41, 41.0)


class Tracker:
    """A SummaryWriter whose file system hangs, and then fails."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert self.goes_on.wait(60)
        raise OSError("the disk is full")

    def add_text(self, name: str, text: str, step: int) -> None:
        raise AssertionError


def test_a_hung_or_failing_tracker_does_not_delay_the_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracker = Tracker()
    with caplog.at_level(logging.WARNING, "keepstep"):
        note_restore(RESTORED, tracker)  # returns while it hangs
        tracker.goes_on.set()
        eventually(lambda: "no note of the restore: OSError: the disk is full" in caplog.text)


def test_a_start_without_a_restore_is_not_recorded() -> None:
    assert note_restore(None, Tracker()) is None
    assert not any(thread.name == "note" for thread in threading.enumerate())


def test_an_unsupported_tracker_is_refused_even_without_a_restore() -> None:
    with pytest.raises(UsageError, match="a dict is no tracker that keepstep knows"):
        note_restore(None, {})
