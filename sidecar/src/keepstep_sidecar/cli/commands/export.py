"""`keepstep export`: writes a step as a directory that Hugging Face's libraries load."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from keepstep.errors import RestoreError, StorageError, UsageError, few
from keepstep.steps import Epoch, StepId, steps_named
from keepstep_sidecar.cli import inventory, output, run_dir
from keepstep_sidecar.cli.commands.archive import archive_of
from keepstep_sidecar.cli.options import directory_option, json_option, run_option
from keepstep_sidecar.cli.run_dir import RunDir
from keepstep_sidecar.config.settings import format_size, size_option
from keepstep_sidecar.config.sidecar import SETTINGS, ArchiveConfig, setting_options, split_address

if TYPE_CHECKING:
    from keepstep.huggingface_export import Exported
    from keepstep_sidecar.tiers.archive.browse import ArchivedRun
    from keepstep_sidecar.tiers.archive.index import ArchivedStep
    from keepstep_sidecar.tiers.source import ReadCancellation, ShardSource
    from keepstep_sidecar.tiers.verified_chunks import OpenSource

_NEWEST = "latest"
_OPENED_AT_ONCE = 16
_ELSEWHERE = ("archive", "archive_endpoint", "archive_region", "secret_file")


@click.command()
@setting_options([setting for setting in SETTINGS if setting.name in _ELSEWHERE])
@directory_option
@run_option(default="the only one in DIR, or in the archive")
@json_option
@click.option(
    "--to",
    "target",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="The directory to make; one that holds anything else is left alone.",
)
@click.option(
    "--only",
    metavar="NAME",
    help="Which component of the Checkpointer; `adapter`: what an optimizer trains of a model, as"
    " PEFT loads it.  [default: the one with parameters, or 'model']",
)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    help="What floating point numbers become, rounded to nearest even.  [default: as they are]",
)
@size_option("--shard-size", default="5GB", help="Of each file at most.  [default: 5GB]")
@click.option(
    "--lowest-rank",
    is_flag=True,
    help="Of tensors that are private to each rank, write the lowest rank's copy.",
)
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="HOST:PORT",
    help="Another machine of the run, for what is not here; may be repeated.",
)
@click.argument("word", metavar="STEP")
def export(
    word: str,
    target: Path,
    only: str | None,
    dtype: str | None,
    shard_size: int,
    lowest_rank: bool,
    as_json: bool,
    **where: Any,
) -> None:
    """Write STEP as safetensors files that Hugging Face's from_pretrained loads.

    STEP is a number, a full name as in `keepstep steps`, or `latest`: the newest committed one. It
    may be of any world and layout: shards are put together, names are those of the model. Every
    byte is verified; DIR appears when all of it is written. With --archive all comes from there.
    With --config .keepstep/RUN/sidecar.toml, what is not on this machine's volumes is read from the
    archive with which the run was started; with --peer, from other machines of the run. A training
    that goes on is not disturbed. Needs torch.

    \b
    Examples:
      keepstep export latest --to ./model
      keepstep export 12000 --to ./model --dtype bf16
      keepstep export 12000 --to ./ema --only ema --shard-size 2GB
      keepstep export latest --to ./lora --only adapter
      keepstep export 12000 --to ./model --archive s3://ckpt/runs --run gpt
      keepstep export 12000 --to ./model --config .keepstep/gpt/sidecar.toml
    """
    library = _library()
    selected = {
        "only": only,
        "dtype": None if dtype is None else library.DTYPES[dtype],
        "shard_bytes": shard_size,
        "lowest_rank": lowest_rank,
    }

    def work(step: _Step, cancel: ReadCancellation) -> Exported:
        with step.opened(cancel) as images:
            layouts = (image.manifest.layout for image in images.values())
            made = library.ComponentExporter(layouts, run=step.run, step_id=step.id, **selected)
            with output.progress(made.total_bytes, quiet=as_json) as advance:
                done = functools.partial(advance, f"step {step.id.step}")
                exported: Exported = made.write(
                    target, functools.partial(_read, images, cancel), done
                )
                return exported

    source = click.get_current_context().get_parameter_source("archive")
    alone = source in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    step_id, exported = asyncio.run(_with_newest(word, work, archive_alone=alone, **where))
    if as_json:
        output.print_json({"step": step_id, **vars(exported)})
        return
    _print(step_id, exported, dtype)


def _library() -> Any:
    """The module that puts tensors together. Raises UsageError if torch or numpy is missing."""
    try:
        from keepstep import huggingface_export as library
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("torch", "numpy"):
            raise
        raise UsageError(
            f"keepstep export needs {error.name}, which is not installed here: run it where the"
            " training is installed, or `pip install torch` (the build for CPUs is enough)"
        ) from error
    return library


def _print(step_id: StepId, exported: Exported, dtype: str | None) -> None:
    files = "1 file" if len(exported.files) == 1 else f"{len(exported.files)} files"
    output.print_line(
        f"{exported.path}: step {step_id}, {exported.tensors} tensors, {files},"
        f" {format_size(exported.bytes)}" + (f", as {dtype}" if dtype else "")
    )
    if exported.files == ("adapter_model.safetensors",):
        output.print_line(
            "PEFT also reads adapter_config.json there: model.peft_config['default']"
            ".save_pretrained(DIR) in the script writes it"
        )
    if exported.tied:
        names = few([f"{name} (is {first})" for name, first in exported.tied.items()], 4)
        output.print_line(f"tied, written once: {names}")
    if exported.left_out:
        output.print_line(f"left out, no tensors: {few(exported.left_out, 4)}")
    if exported.own:
        output.print_line(
            "warning: ranks have values of their own, the lowest rank's are written, which are not"
            f" the whole model's where they are slices: {few(exported.own, 4)}",
            err=True,
        )


# --- reading -----------------------------------------------------------------------------------


class _RetiredError(RestoreError):
    """The step was retired after it was chosen."""


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A step to export. `sources`: one for each rank, in the order of ranks."""

    run: str
    id: StepId
    sources: tuple[ShardSource, ...]

    @contextlib.contextmanager
    def opened(self, cancel: ReadCancellation) -> Iterator[dict[int, OpenSource]]:
        """Open all images, by `Layout.number`: open files stay readable if the step is retired.

        Raises RestoreError if the step was retired before, ImageError, StorageError.
        """
        from keepstep_sidecar.tiers import verified_chunks
        from keepstep_sidecar.tiers.source import ShardGone

        with contextlib.ExitStack() as stack:

            def enter(source: ShardSource) -> OpenSource:
                return stack.enter_context(verified_chunks.open_verified(source, cancel))

            try:
                bases = [source.beside for source in self.sources if source.beside is not None]
                with ThreadPoolExecutor(_OPENED_AT_ONCE) as pool:
                    images = pool.map(enter, (*self.sources, *bases))
                    opened = {image.manifest.layout.image_index: image for image in images}
            except ShardGone as error:
                raise _RetiredError(
                    f"step {self.id} was retired just now; `keepstep steps` shows what is kept, and"
                    " --keep says how long"
                ) from error
            yield opened


def _read(
    images: Mapping[int, OpenSource],
    cancel: ReadCancellation,
    rank: int,
    chunk: int,
    into: memoryview,
) -> None:
    """Implements `keepstep.huggingface_export.Read`."""
    if cancel.done:
        raise StorageError("interrupted")
    begin, end = images[rank].manifest.bounds_of_chunk(chunk)
    for _ in images[rank].read([(chunk, into[: end - begin])]):
        pass


# --- which step --------------------------------------------------------------------------------


_TRIES = 5


async def _with_newest(
    word: str, work: Callable[[_Step, ReadCancellation], Exported], **where: Any
) -> tuple[StepId, Exported]:
    """As `_with_step`. If the newest step is retired before its shards are open, a newer one has
    come, and is taken."""
    for _ in range(_TRIES - 1 if word == _NEWEST else 0):
        with contextlib.suppress(_RetiredError):
            return await _with_step(word, work, **where)
    return await _with_step(word, work, **where)


async def _with_step(
    word: str,
    work: Callable[[_Step, ReadCancellation], Exported],
    *,
    values: dict[str, Any],
    directory: Path,
    run: str | None,
    archive_alone: bool,
    peers: tuple[str, ...],
) -> tuple[StepId, Exported]:
    """Find the step that `word` names, and do `work` on a thread. Raises KeepstepError."""
    from keepstep_sidecar.tiers import verified_chunks

    async def finish(step: _Step) -> tuple[StepId, Exported]:
        return step.id, await verified_chunks.run_cancellable(None, functools.partial(work, step))

    archive = archive_of(values)
    if archive is not None and archive_alone:
        return await _from_archive(archive, run, word, {}, finish)
    kept = run_dir.find_run(directory, run)
    held = await asyncio.to_thread(_on_volumes, kept)
    epochs = await asyncio.to_thread(inventory.recorded_epochs, kept)
    silent: tuple[str, ...] = ()
    # A restore passes over them, because the script failed by itself twice after one of them.
    known = (await asyncio.to_thread(inventory.read_holdings, kept)).steps
    suspects = frozenset(status.id for status in known if status.suspect)
    step_id = _committed(held, epochs, word, suspects)
    if peers and (step_id is None or word == _NEWEST):
        silent = await _add_peers(kept, peers, held, values.get("secret_file"))
        step_id = _committed(held, epochs, word, suspects)
    if step_id is not None:
        for doubt in _doubts(step_id, epochs, suspects):
            output.print_line(f"warning: step {step_id} {doubt}", err=True)
        if silent:
            output.print_line(f"warning: not in reach: {'; '.join(silent)}", err=True)
        sources = tuple(held[step_id][rank] for rank in sorted(held[step_id]))
        return await finish(_Step(run=kept.name, id=step_id, sources=sources))
    if archive is None:
        raise _incomplete(kept, word, held, silent)
    return await _from_archive(archive, kept.name, word, held, finish)


_Held = dict[StepId, dict[int, "ShardSource"]]
"""The nearest source of each shard in reach, by step and rank."""


async def _from_archive(
    config: ArchiveConfig,
    run: str | None,
    word: str,
    held: _Held,
    finish: Callable[[_Step], Awaitable[tuple[StepId, Exported]]],
) -> tuple[StepId, Exported]:
    """Export a step of the archive. The archive is not read for shards in `held`."""
    from keepstep_sidecar.tiers.archive import browse

    async with browse.open_archived_run(config, run) as holding:
        step = await _archived(holding, word)
        near = held.get(step.id, {})
        sources = tuple(
            near[shard.rank]
            if shard.rank in near and near[shard.rank].shard.root == shard.root
            else holding.source(shard)
            for shard in holding.shards(step)
        )
        return await finish(_Step(run=holding.run, id=step.id, sources=sources))


async def _archived(holding: ArchivedRun, word: str) -> ArchivedStep:
    if word != _NEWEST:
        return (await holding.chosen(word, sound=True))[0]
    survey = await holding.survey()
    if survey.conflict:
        raise RestoreError(survey.conflict)
    alive = [step for step in survey.complete_steps if not _dead(step.id, survey.epochs)]
    if not alive:
        raise UsageError(f"{holding.store.where}/{holding.run} holds no whole step")
    return alive[-1]


def _dead(step_id: StepId, epochs: Sequence[Epoch]) -> bool:
    from keepstep.core.commit_rule import StepLiveness, trace_lineage

    lineage = trace_lineage({epoch.id: epoch for epoch in epochs}, seen={step_id.epoch})
    return lineage.step_liveness(step_id) is StepLiveness.DEAD


def _on_volumes(kept: RunDir) -> _Held:
    """The shards on this machine's volumes: those of its ranks, and copies for its peers."""
    from keepstep_sidecar.tiers.source import file_source

    held: _Held = {}
    for shard in (*inventory.survey_volumes(kept)[0], *inventory.list_peer_copies_on_volumes(kept)):
        source = file_source(shard, run=kept.name)
        held.setdefault(shard.step_id, {}).setdefault(shard.rank, source)
    return held


async def _add_peers(
    kept: RunDir, peers: Sequence[str], held: _Held, secret: Path | None
) -> tuple[str, ...]:
    """Ask the peers what they hold, and add it to `held`. Returns which of them do not answer, and
    why. Raises UsageError."""
    from keepstep_sidecar.tiers.peer import client
    from keepstep_sidecar.tiers.peer.secret import SecretCredentials, read_secret

    for address in peers:
        split_address(address)
    credentials = SecretCredentials(read_secret(secret), kept.name, kept.config.node_rank)
    found, silent = await client.list_peer(peers, credentials, run=kept.name)
    for source in found:
        held.setdefault(source.shard.step_id, {}).setdefault(source.shard.rank, source)
    return silent


def _doubts(
    step_id: StepId, epochs: Sequence[Epoch], suspects: Collection[StepId]
) -> Iterator[str]:
    if step_id in suspects:
        yield "is suspect: the script failed twice soon after it"
    if _dead(step_id, epochs):
        yield "is dead: the run went back to an older step and on from there"


def _committed(
    held: _Held, epochs: Sequence[Epoch], word: str, suspects: Collection[StepId]
) -> StepId | None:
    """The step that `word` names, if all its shards are in reach; else None.

    `latest` is the newest step that is not dead, preferably not a suspect one. Raises UsageError if
    several epochs have a step of that number.
    """
    # the commit rule: sealed shards cover the whole world
    whole = sorted(
        step_id
        for step_id, ranks in held.items()
        if {rank.shard.world for rank in ranks.values()} == {len(ranks)}
    )
    if word == _NEWEST:
        alive = [step_id for step_id in whole if not _dead(step_id, epochs)]
        return max([step_id for step_id in alive if step_id not in suspects] or alive, default=None)
    return inventory.choose_step(word, whole)


def _incomplete(kept: RunDir, word: str, held: _Held, silent: Sequence[str]) -> UsageError:
    """The error for a step that is not whole: what is missing of it, and what to do."""
    away = f"; away: {'; '.join(silent)}" if silent else ""
    for step_id in steps_named(word, held):
        world = next(iter(held[step_id].values())).shard.world
        missing = [str(rank) for rank in range(world) if rank not in held[step_id]]
        return UsageError(
            f"step {step_id}: of {world} shards, those of rank {few(missing, 8)} are not on this"
            " machine's volumes; name an archive that has them with --archive, or take archive"
            f" and peers from the run's record with --config {kept.record}{away}"
        )
    there = few([str(step_id) for step_id in sorted(held)][-5:], 5) or "none"
    what = "committed step" if word == _NEWEST else f"step {word}"
    return UsageError(
        f"no {what} of run {kept.name!r} on the volumes; the newest there: {there}. --archive names"
        f" another place, --config {kept.record} the archive and the peers of the run{away}"
    )
