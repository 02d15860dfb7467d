"""`kubectl-keepstep`, which kubectl runs as `kubectl keepstep`. It only parses, asks and prints."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Final, NoReturn

import click
import yaml

from keepstep.errors import KeepstepError, UsageError
from keepstep_operator import __version__, names
from keepstep_operator.kubectl import doctor as checks
from keepstep_operator.kubectl import views
from keepstep_operator.kubectl.cluster import Cluster, Refused
from keepstep_operator.printing import printable

_LATEST: Final = "latest"


class _AsWritten(yaml.SafeLoader):
    """A loader that keeps scalars as texts that only YAML 1.1 takes for a date or for a number of
    base 60. kubectl does the same."""

    yaml_implicit_resolvers: ClassVar[Any] = {  # type: ignore[misc]
        first: [(tag, pattern) for tag, pattern in found if not tag.endswith(("timestamp", ":int"))]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_AsWritten.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"[-+]?(0|[1-9][0-9]*|0x[0-9a-fA-F]+|0[0-7]+)$"),
    [*"-+0123456789"],
)


class _Misuse(click.ClickException):
    exit_code = 2


class _Commands(click.Group):
    """Our own errors become one line and an exit code. Commands are listed in the order of their
    definition."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeepstepError as error:
            kind = _Misuse if isinstance(error, UsageError) else click.ClickException
            raise kind(printable(str(error), lines=True)) from error


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExamples:\n  kubectl keepstep runs -n ml\n  kubectl keepstep rollback gpt 1200",
)
@click.version_option(__version__, prog_name="kubectl keepstep")
def cli() -> None:
    """Runs of keepstep in this cluster, and what to do with their steps.

    Reads and patches objects of the API with your own rights, as kubectl does.
    """


def say(text: str, *, err: bool = False) -> None:
    """Print lines. Every output of the plugin goes through here, since much of it is text of pods,
    and could be meant for the terminal."""
    click.echo(printable(text, lines=True), err=err)


def _options(command: Any) -> Any:
    """Add the options that kubectl has, too."""
    command = click.option("--context", help="Context of the kubeconfig; the current one.")(command)
    return click.option("-n", "--namespace", help="Namespace; the context's.")(command)


def _output(command: Any) -> Any:
    choice = click.Choice(["table", "json"])
    option = click.option("-o", "--output", type=choice, default="table", help="table or json.")
    return option(command)


def _examples(*lines: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  kubectl keepstep {one}" for one in lines)


def _print(output: str, data: Any, lines: Sequence[str]) -> None:
    say(json.dumps(data, indent=2) if output == "json" else "\n".join(map(printable, lines)))


def _steps(cluster: Cluster, run: views.Body) -> list[views.Body]:
    return views.steps(run, cluster.checkpoints(run["metadata"]["name"]))


# --- what there is -------------------------------------------------------------------------------


@cli.command(epilog=_examples("runs", "runs -n ml -o json"))
@_output
@_options
def runs(namespace: str | None, context: str | None, output: str) -> None:
    """Runs of the namespace."""
    found = [views.summary(one) for one in Cluster(context=context, namespace=namespace).runs()]
    head = ("run", "job", "phase", "step", "committed", "restarts", "protected", "origin")
    rows = [[one[name] for name in head] for one in found]
    _print(output, found, views.table(rows, head=[one.upper() for one in head]))


@cli.command(epilog=_examples("steps gpt-1a2b", "steps gpt-1a2b -o json"))
@click.argument("run")
@_output
@_options
def steps(run: str, namespace: str | None, context: str | None, output: str) -> None:
    """Steps of a run that the API knows of: the newest of each tier, pinned and archived ones."""
    cluster = Cluster(context=context, namespace=namespace)
    found = _steps(cluster, cluster.run(run))
    head = ("step", "epoch", "tiers", "committed", "pinned", "id")
    rows = [[one[name] for name in head] for one in found]
    _print(output, found, views.table(rows, head=[one.upper() for one in head]))


@cli.command(epilog=_examples("tree gpt-1a2b"))
@click.argument("run")
@_output
@_options
def tree(run: str, namespace: str | None, context: str | None, output: str) -> None:
    """Where a run began, its epochs, and the runs that began from it."""
    cluster = Cluster(context=context, namespace=namespace)
    body = cluster.run(run)
    found = views.tree(body, _steps(cluster, body), cluster.runs())
    _print(output, found, views.drawn(found))


@cli.command(epilog=_examples("logs gpt-1a2b", "logs gpt-1a2b --previous --tail 500"))
@click.argument("run")
@click.option("--tail", default=100, type=click.IntRange(1), help="Lines of each pod; 100.")
@click.option("--previous", is_flag=True, help="Of the sidecars' life before this one.")
@_options
def logs(run: str, tail: int, previous: bool, namespace: str | None, context: str | None) -> None:
    """What the sidecars of a run wrote last, each line behind its pod's name."""
    cluster = Cluster(context=context, namespace=namespace)
    cluster.run(run)
    pods, refused = [one["metadata"]["name"] for one in cluster.pods(run)], 0
    for pod in pods:
        try:
            lines = cluster.log(pod, lines=tail, previous=previous).splitlines()
        except Refused as error:
            lines, refused = [str(error)], refused + 1
        for line in lines:
            say(f"{pod}: {line}")
    if not pods:
        raise click.ClickException(f"no pod of run {run} has a sidecar now")
    sys.exit(1 if refused else 0)


@cli.command(epilog=_examples("ui gpt-1a2b", "ui gpt-1a2b -n ml --port 8790"))
@click.argument("run")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port on 127.0.0.1 to listen on; a free one.",
)
@_options
def ui(run: str, port: int, namespace: str | None, context: str | None) -> None:
    """Print the URL of a page of RUN, as the sidecar of its node rank 0 sees it.

    Forwards a port to that pod, by your own right (get and create of pods/portforward). The token
    in the URL lets in one browser, once. Ctrl-C ends it.
    """
    from keepstep_operator.kubectl.page import Page, serve

    cluster = Cluster(context=context, namespace=namespace)
    pods = cluster.pods(run, node_rank=0)
    running = [one for one in pods if one.get("status", {}).get("phase") == "Running"]
    if not running:
        cluster.run(run)  # that there is no such run is said first
        raise click.ClickException(f"no pod of node rank 0 of run {run} is running now")
    asyncio.run(serve(Page(cluster, running[-1]), port=port, run=run, say=say))


# --- what people ask for -------------------------------------------------------------------------


@cli.command(epilog=_examples("rollback gpt-1a2b 1200"))
@click.argument("run")
@click.argument("step")
@_options
def rollback(run: str, step: str, namespace: str | None, context: str | None) -> None:
    """Have the next restart of RUN begin from STEP; later steps are given up then.

    STEP is a number or a full id. Writes spec.restoreFrom of the CheckpointRun, and nothing else.
    """
    cluster = Cluster(context=context, namespace=namespace)
    _refuse_other_run(run, step)
    known = _steps(cluster, cluster.run(run))
    wanted = step.rpartition("/")[2]
    if not any(wanted in (one["id"], str(one["step"])) for one in known):
        there = ", ".join(str(one["step"]) for one in known[:8]) or "none"
        note = f"note: the API knows of no step {wanted} of run {run} (there is: {there}); unless"
        say(f"{note} its pods have it, the condition RestoreFrom says NotFound", err=True)
    cluster.ask_to_restore_from(run, step)
    say(
        f"run {run} is to go on from step {step} when it restarts. Wait until its condition"
        f" RestoreFrom says Waiting (kubectl -n {cluster.namespace} describe ckrun {run}), then"
        " restart the job's pods"
    )


@cli.command("fresh-start", epilog=_examples("fresh-start gpt-1a2b"))
@click.argument("run")
@_options
def fresh_start(run: str, namespace: str | None, context: str | None) -> None:
    """Let RUN begin again at step 0, if its next start finds no step that is whole.

    For a run whose starts are refused because a part of every step is gone. While a step can be
    restored, it is. Annotates the CheckpointRun, and writes nothing else.
    """
    cluster = Cluster(context=context, namespace=namespace)
    cluster.run(run)
    cluster.annotate(run, {names.FRESH_START_ANNOTATION: names.FRESH_START_ALLOW})
    say(f"run {run} begins again at step 0 at its next start, if no step can be restored then")


def _refuse_other_run(run: str, step: str) -> None:
    other, slash, _ = step.rpartition("/")
    if slash and other != run:
        raise UsageError(
            f"{step} is a step of another run: a new job begins from it, see"
            " `kubectl keepstep fork --help`"
        )


@cli.command(
    epilog=_examples("fork gpt-1a2b 1200 -f job.yaml | kubectl apply -f -", "fork gpt latest -f -")
)
@click.argument("run")
@click.argument("step")
@click.option("-f", "--filename", required=True, type=click.File(), help="Manifest of a new job.")
@_options
def fork(run: str, step: str, filename: Any, namespace: str | None, context: str | None) -> None:
    """Print a manifest whose job begins from an archived STEP of RUN; nothing is created.

    STEP is a number, a full id, or latest. Adds the annotation keepstep.dev/restore-from to every
    pod template. The job must be a new one, whose policy names the same archive.
    """
    cluster = Cluster(context=context, namespace=namespace)
    found = _steps(cluster, cluster.run(run))
    archived = [one for one in found if "archive" in one["tiers"]]
    if step != _LATEST and not any(step in (one["id"], str(one["step"])) for one in archived):
        if not step.isdecimal():
            views.full_id(step, found)
        note = f"note: the API knows of no archived step {step} of run {run}; without it in the"
        say(f"{note} archive the job does not begin", err=True)
    try:
        manifests = [one for one in yaml.load_all(filename, _AsWritten) if one]
    except yaml.YAMLError as error:
        raise UsageError(f"{filename.name} is no YAML: {error}") from error
    annotation, origin = names.RESTORE_FROM_ANNOTATION, f"{run}/{step}"
    bodies = [one for one in manifests if isinstance(one, dict)]
    if not sum(views.with_fork(one, origin, annotation=annotation) for one in bodies):
        raise UsageError(f"{filename.name} has no pod template (template.spec.containers)")
    say(yaml.safe_dump_all(manifests, sort_keys=False).removesuffix("\n"))


@cli.command(epilog=_examples("pin gpt-1a2b 1200", "pin gpt-1a2b 0003.1f9c2d7a-000001200"))
@click.argument("run")
@click.argument("step")
@_options
def pin(run: str, step: str, namespace: str | None, context: str | None) -> None:
    """Keep STEP of RUN: retention never deletes it. Writes spec.pins of the CheckpointRun."""
    cluster = Cluster(context=context, namespace=namespace)
    body = cluster.run(run)
    pins, chosen = views.pinned(body), views.full_id(step, _steps(cluster, body))
    if chosen not in pins:
        cluster.replace_pins(body, [*pins, chosen])
    say(f"{chosen} is pinned")


@cli.command(epilog=_examples("unpin gpt-1a2b 1200"))
@click.argument("run")
@click.argument("step")
@_options
def unpin(run: str, step: str, namespace: str | None, context: str | None) -> None:
    """Let retention decide on STEP of RUN again."""
    cluster = Cluster(context=context, namespace=namespace)
    body = cluster.run(run)
    known = [one for one in _steps(cluster, body) if one["pinned"]]
    pins, chosen = views.pinned(body), views.full_id(step, known)
    if chosen not in pins:
        raise UsageError(f"{chosen} is not pinned; pinned are: {', '.join(pins) or 'none'}")
    cluster.replace_pins(body, [one for one in pins if one != chosen])
    say(f"{chosen} is not pinned any more")


@cli.command(epilog=_examples("doctor", "doctor -n ml -o json"))
@_output
@_options
def doctor(namespace: str | None, context: str | None, output: str) -> NoReturn:
    """Check the cluster: kinds, webhook, operator, versions, huge pages. Exit 1 if one is bad."""
    found = checks.examine(Cluster(context=context, namespace=namespace))
    data = [{"check": one.check, "result": one.result, "said": one.said} for one in found]
    rows = [list(one.values()) for one in data]
    _print(output, data, views.table(rows, head=("CHECK", "RESULT", "")))
    sys.exit(any(one.result == checks.BAD for one in found))
