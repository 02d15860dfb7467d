"""A note of each restore, where the curves are looked at: W&B, TensorBoard, MLflow.

    from keepstep.integrations.notes import note_restore

    note_restore(checkpointer.restore(), wandb.run)  # or a SummaryWriter, or the module mlflow

A curve that a run went back on is then not taken for one that jumped. The note is written on a
thread of its own: a tracker that hangs or raises does not hold up training.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from keepstep.checkpointer import Restored
from keepstep.errors import UsageError

log = logging.getLogger("keepstep")

_KEY = "keepstep/restored_step"


def note_restore(restored: Restored | None, *trackers: Any) -> Restored | None:
    """Write to each of `trackers` that this life goes on from a step; returns `restored`.

    `trackers`: a run of Weights & Biases (`wandb.run`), a TensorBoard `SummaryWriter` (torch's or
    tensorboardX's), or the module `mlflow` with an active run; None, as on ranks that have no
    tracker, is passed over. The value is the step, at that step: with W&B it comes with the next
    `log`, whose steps stay as they are, and stands in the summary. Nothing is written if nothing
    was restored. Raises UsageError for any other tracker.
    """
    notes = [_note(tracker, restored) for tracker in trackers if tracker is not None]
    if restored is not None:
        for note in notes:
            threading.Thread(target=_write, args=(note,), name="note", daemon=True).start()
    return restored


def _write(note: Callable[[], object]) -> None:
    try:
        note()
    except Exception as error:
        log.warning(
            "keepstep: the experiment tracker has no note of the restore: %s: %s"
            " [integration.note_failed]",
            *(type(error).__name__, error),
        )


def _note(tracker: Any, restored: Restored | None) -> Callable[[], object]:
    """What writes the note. Called in the thread that trains, where MLflow knows the active run."""
    step = 0 if restored is None else restored.step
    text = "" if restored is None else f"step {step} of epoch {restored.epoch}: {restored.tier}"
    if hasattr(tracker, "summary") and hasattr(tracker, "log"):
        return lambda: _to_wandb(tracker, step, text)
    if hasattr(tracker, "add_scalar") and hasattr(tracker, "add_text"):
        return lambda: _to_tensorboard(tracker, step, text)
    if hasattr(tracker, "MlflowClient") and hasattr(tracker, "active_run"):
        if (run := tracker.active_run()) is None:
            raise UsageError("mlflow has no active run: call mlflow.start_run() first")
        return lambda: _to_mlflow(tracker.MlflowClient(), run.info.run_id, step, text)
    raise UsageError(
        f"a {type(tracker).__name__} is no tracker that keepstep knows: give it wandb.run, a"
        " SummaryWriter, or the module mlflow"
    )


def _to_wandb(run: Any, step: int, text: str) -> None:
    run.log({_KEY: step}, commit=False)
    run.summary.update({_KEY: step, "keepstep/restored": text})


def _to_tensorboard(writer: Any, step: int, text: str) -> None:
    writer.add_scalar(_KEY, step, step)
    writer.add_text("keepstep/restored", text, step)


def _to_mlflow(client: Any, run_id: str, step: int, text: str) -> None:
    client.log_metric(run_id, _KEY, step, step=step)
    client.set_tag(run_id, "keepstep.restored", text)
