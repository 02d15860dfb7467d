"""The demonstration behind `make demo`: kill a training run four times, lose no bit of it.

Two ranks run `train_gpt.py` on the text of the Python standard library, three times:

    plain       without keepstep, never killed: the reference
    kept        every step kept, never killed: shows what keeping costs
    killed      every step kept. SIGKILL hits one trainer, then the sidecar, then everything at
                once, with the shared memory removed as if the machine had lost power, and finally
                one trainer again, after a start with --warm

The demo succeeds (exit 0) only if the losses of each step are the same float in all runs, bit for
bit. It leaves logs, the plot and the last committed steps in its output directory. It leaves no
process and no shared memory, not even after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from demo_report import Death, Report, plot, show
from demo_runs import RANKS, DemoError, Household, Run, Setting, kill
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# --- what kills ------------------------------------------------------------------------------


def kill_trainer(run: Run) -> str:
    """Kill one rank. torchrun ends the other rank, and `keepstep run` starts torchrun again. The
    slots stay in memory."""
    (trainer,) = run.setting.household.members(f"RANK={RANKS - 1}")
    kill(trainer)
    return ""


def kill_sidecar(run: Run) -> str:
    """Kill the sidecar. `keepstep run` starts another one, which adopts the slots. Training does
    not wait for it."""
    memory = run.memory
    assert memory, "a run that made steps has recorded its memory"
    before = max(run.committed(), run.journal.frontier())
    killed = time.monotonic()
    kill(int((memory / "sidecar.pid").read_text()))
    run.follow(lambda: run.committed() > before)
    seconds = time.monotonic() - killed
    return f"training went on, the next step was committed {seconds:.1f} s later."


def kill_everything(run: Run) -> str:
    """Kill all processes and remove the shared memory, so that only the drive is left. Then run the
    same command again, this time with --warm."""
    run.setting.household.kill_all()
    run.reap()
    if run.memory:
        shutil.rmtree(run.memory)
    run.launch(warm=True)
    return ""


def kill_warm_trainer(run: Run) -> str:
    """Kill the trainer that started last. Its successor is forked from a process that has already
    imported torch."""
    kill(run.journal.started()[-1].pid)
    return "it was started with `keepstep run --warm`: no life pays for Python and torch again."


KILLS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("one trainer", kill_trainer),
    ("the sidecar", kill_sidecar),
    ("everything, memory gone", kill_everything),
    ("one trainer, --warm", kill_warm_trainer),
)


def train_through_kills(run: Run) -> list[Death]:
    """Train to the end, with the kills at equal distances. Returns the kills."""
    deaths = []
    run.launch()
    for number, (victim, strike) in enumerate(KILLS, start=1):
        run.follow_to(run.setting.steps * number // (len(KILLS) + 1))
        step, wall = run.journal.frontier(), time.time()
        run.setting.progress.console.print(f"[red]SIGKILL[/] at step {step}: {victim}")
        deaths.append(Death(victim=victim, step=step, wall=wall, note=strike(run)))
    run.finish()
    return deaths


# --- the demo --------------------------------------------------------------------------------


def demonstrate(setting: Setting) -> Report:
    """Make all three runs, one after the other, because each needs both cores of a small
    machine."""
    plain = Run(setting, "plain", keepstep=False)
    kept = Run(setting, "kept", keepstep=True)
    killed = Run(setting, "killed", keepstep=True)
    try:
        for run in (plain, kept):
            run.launch()
            run.finish()
        deaths = train_through_kills(killed)
    finally:
        setting.household.kill_all()
        for run in (kept, killed):
            if run.memory:
                shutil.rmtree(run.memory, ignore_errors=True)
    return Report(
        steps=setting.steps,
        start_s=plain.start_s(),
        plain=plain.journal,
        kept=kept.journal,
        killed=killed.journal,
        deaths=tuple(deaths),
    )


@contextlib.contextmanager
def progress_on(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description:7}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield progress


def prepare(out: Path) -> None:
    """Remove from `out` only what an earlier demo left there."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "keepstep", ignore_errors=True)
    for name in ("plain", "kept", "killed"):
        for suffix in (".jsonl", ".out"):
            (out / f"{name}{suffix}").unlink(missing_ok=True)


def on_terminate(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150, help="steps of each run (default 150)")
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="output directory (default demo-out)"
    )
    args = parser.parse_args()
    if args.steps < 20:
        parser.error("--steps must be at least 20: the kills need some distance")
    return args


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, on_terminate)
    console = Console()
    out = args.out.resolve()
    prepare(out)
    console.print("Three runs of a small GPT, two ranks each; the third is killed four times.")
    try:
        with progress_on(console) as progress:
            setting = Setting(out=out, steps=args.steps, household=Household(), progress=progress)
            report = demonstrate(setting)
    except DemoError as error:
        console.print(f"[red]The demo failed:[/] {escape(str(error))}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted; nothing is left running.")
        return 130
    show(report, console)
    plot(report, out / "loss.png")
    console.print(f"Plot: {args.out / 'loss.png'}. The last steps are still there, look at them:")
    console.print(f"  keepstep steps --dir {args.out / 'keepstep'} --run killed")
    return 0 if report.bit_equal else 1


if __name__ == "__main__":
    sys.exit(main())
