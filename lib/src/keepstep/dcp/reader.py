"""The storage of `dcp.load`: a committed step, verified, for any world size and layout.

The images come from the sidecar (`restore.images`), or from the directory of a committed step,
which is the way out of keepstep: it needs no sidecar. From the sidecar, an image is mapped if it is
in memory, and is otherwise read in verified chunks through one window. So at any world size, a rank
needs only the memory of one window besides its tensors. Bytes are moved as in any other restore.

Stock DCP silently leaves rows untouched when a shard is missing, and joins whatever it finds. So a
directory that is not exactly one step of one run by one world is refused, and the offending file is
named. A shard's manifest vouches for each of its chunks. Each chunk is verified once, before
anything is handed out. Files are mapped, so no memory is needed besides the tensors.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from keepstep.client.session import SidecarSession, restore_timeout_s
from keepstep.dcp import session as sessions
from keepstep.dcp.session import (
    KeyPath,
    LoadStepBallot,
    SavedStateTree,
    choose_load_step,
    has_step_number,
    rank_and_world,
    step_number_of,
)
from keepstep.directory import open_user_named_file
from keepstep.errors import (
    CoverageError,
    ForeignError,
    FormatError,
    ImageError,
    MismatchError,
    RestoreError,
    SidecarAbsent,
    SidecarError,
    StorageError,
    UsageError,
    few,
)
from keepstep.image import extras_codec
from keepstep.image.control_page import Manifest
from keepstep.image.layout import CHUNK_BYTES
from keepstep.restore.fill_plan import (
    Box,
    FillPlan,
    ImageIndex,
    IndexBuilder,
    Piece,
    SavedTensor,
    TensorRequest,
    byte_range,
    make_fill_plan,
)
from keepstep.restore.images import StepImages, W, fill_targets, map_image
from keepstep.state.taken_state import DTYPE_OF
from keepstep.steps import NEAREST_FIRST, StepId, Tier, make_base_file_name, shard_name

log = logging.getLogger("keepstep")

_SUFFIX = ".safetensors"
_STOCK = ".metadata"
_THREADS = 4


class StepFolder:
    """One committed step, as `StepImages` of its shards. Read only what `verify` has
    verified."""

    def __init__(self, path: Path) -> None:
        """Read all headers and seals.

        Raises RestoreError for a directory without a step or with an incomplete one, ImageError for
        a file that is no shard, and ForeignError for a shard of another step, epoch, run or world.
        """
        self.path = path
        try:
            files = sorted(path for path in path.iterdir() if path.name.endswith(_SUFFIX))
        except OSError as error:
            raise RestoreError(f"{path}: no directory of a step ({error})") from error
        if not files:
            if (path / _STOCK).exists():
                raise RestoreError(
                    f"{path}: torch's own FileSystemWriter wrote it: load it with FileSystemReader"
                )
            raise RestoreError(f"{path}: no shard in it; name the directory of a committed step")
        found = [(_manifest(file), file) for file in files]
        shards = sorted(found, key=lambda pair: pair[0].layout.image_index)
        images = [shard for shard in shards if not shard[0].layout.is_base]
        if not images:
            raise RestoreError(f"{path}: no shard in it; name the directory of a committed step")
        for manifest, file in images:
            _check_alike(manifest, file, *images[0])
        self._manifests = {manifest.layout.image_index: manifest for manifest, _ in shards}
        self._files = {manifest.layout.image_index: file for manifest, file in shards}
        self._verified: set[tuple[int, int]] = set()
        self._mapped: dict[int, tuple[Tensor, memoryview]] = {}
        _check_complete(path, [manifest for manifest, _ in images])
        for manifest, _ in images:
            _check_base(path, manifest, self._manifests.get(manifest.layout.rank + len(images)))
        self.id: StepId = images[0][0].control.step_id
        builder = IndexBuilder(len(images))
        for manifest in self._manifests.values():
            builder.add_image(manifest.layout)
        self.index: ImageIndex = builder.build()

    @property
    def nearness_by_rank(self) -> list[int]:
        """All shards are equally near."""
        return [0] * (2 * self.index.world)

    def verify(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        """Check the digests of all chunks of these (rank, begin, end) that were not yet verified.
        Raises DigestError."""
        required = {
            (rank, chunk)
            for rank, begin, end in ranges
            for chunk in range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES))
            if begin < end
        }
        threads = min(_THREADS, len(os.sched_getaffinity(0)), max(1, len(required)))
        with ThreadPoolExecutor(threads, thread_name_prefix="keepstep-verify") as pool:
            for _ in pool.map(self._verify, sorted(required - self._verified)):
                pass

    def _verify(self, place: tuple[int, int]) -> None:
        rank, chunk = place
        manifest, (_, view) = self._manifests[rank], self._map(rank)
        manifest.verify_chunk(
            chunk, view[slice(*manifest.bounds_of_chunk(chunk))], path=self._files[rank]
        )
        self._verified.add(place)

    def _map(self, rank: int) -> tuple[Tensor, memoryview]:
        """The bytes of a file, mapped when it is first read; do not write to them."""
        if rank not in self._mapped:
            try:
                self._mapped[rank] = map_image(str(self._files[rank]))
            except OSError as error:
                gone = f"{self._files[rank]}: it is gone ({error}); load again"
                raise StorageError(gone) from error
        return self._mapped[rank]

    def skeleton(self, rank: int) -> str:
        """The tree of a saved rank's state."""
        return self._manifests[rank].layout.skeleton

    def extras_range(self, rank: int) -> tuple[int, int, int]:
        """Where the extras lie in a saved rank's image, as (rank, begin, end) for `verify`."""
        begin = self._manifests[rank].layout.extras_begin
        return rank, begin, begin + self._manifests[rank].control.extras_bytes

    def extras(self, rank: int) -> bytes:
        """The bytes of everything in a saved rank's image that is not a tensor."""
        _, begin, end = self.extras_range(rank)
        return bytes(self._map(rank)[1][begin:end])

    def mapped_bytes(self, rank: int) -> Tensor:
        """The bytes of an image."""
        return self._map(rank)[0]

    def iter_chunks(self, requests: Iterable[W]) -> Iterator[tuple[W, Tensor]]:
        """Empty: all images are mapped, so nothing is read in chunks."""
        return iter(())

    def close(self) -> None:
        """Nothing to do: each mapping is released with the last view of it."""


def is_shard_directory(path: Path) -> bool:
    """Whether this path means a directory of shards, and not a step of the run by its number.

    It does if the directory holds a checkpoint, or if only keepstep gives such a name, even if the
    directory does not exist: a mistake in such a path must not load a step of another run. Any
    other directory may be one that a script made for a writer that would write there, with other
    files in it.
    """
    try:
        StepId.parse(path.name)
    except ValueError:
        there = path.glob("rank-*" + _SUFFIX), path.glob(_STOCK)
        return any(True for found in there for _ in found)
    return True


def _manifest(path: Path) -> Manifest:
    """Header, digest table and seal of a file. Raises ImageError and StorageError, which name the
    file."""
    try:
        with open(open_user_named_file(path), "rb") as file:
            fd = file.fileno()
            return Manifest.read(
                lambda begin, end: os.pread(fd, end - begin, begin),
                os.fstat(fd).st_size,
                path=path,
            )
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error}); use another copy") from error


def _check_alike(manifest: Manifest, path: Path, first: Manifest, other_path: Path) -> None:
    page, other = manifest.control, first.control
    for what, found, expected in (
        ("run", page.run, other.run),
        ("step", page.step_id, other.step_id),
        ("world", page.world, other.world),
    ):
        if found != expected:
            raise ForeignError(
                f"the shard of {what} {found} among those of {expected} ({other_path.name}):"
                " take it out of this directory",
                path=path,
            )
    if path != other_path and page.rank == other.rank:
        raise ForeignError(f"rank {page.rank} is there twice, see {other_path}", path=path)
    name = shard_name(page.rank, page.world)
    if path.name != name:
        raise ForeignError(f"it is the shard {name}: give it that name", path=path)


def _check_complete(path: Path, shards: list[Manifest]) -> None:
    world, ranks = shards[0].layout.world, {shard.layout.rank for shard in shards}
    missing = [shard_name(rank, world) for rank in range(world) if rank not in ranks]
    if missing:
        raise RestoreError(
            f"{path}: step {shards[0].control.step_id} is incomplete,"
            f" {few(missing, 4)} missing: bring it back, or load another step"
        )


def _check_base(path: Path, shard: Manifest, base: Manifest | None) -> None:
    ref, layout = shard.control.base, shard.layout
    if ref is not None and (base is None or not ref.matches_control_page(base.control)):
        name = make_base_file_name(layout.rank, layout.world)
        raise RestoreError(
            f"{path}: {name}, to which {shard_name(layout.rank, layout.world)} refers, is"
            f" {'missing' if base is None else 'another one'}: bring it back, or load another step"
        )


class StepReader:
    """One step, for one load of one rank. `where`: for messages. `foreign`: a `Checkpointer` saved
    the step, so it has no values that DCP could load."""

    def __init__(
        self, images: StepImages | StepFolder, step_id: StepId, *, where: str, rank: int
    ) -> None:
        """Choose the boxes to read.

        Of equal boxes, those of the nearest image are taken. Among equally near ones, each rank
        begins its search at another rank, so that the load is spread. Raises FormatError, and
        CoverageError, which names all boxes that are missing, overlap, or contradict each other.
        """
        self.id, self.where = step_id, where
        self._images = images
        self._index: ImageIndex = images.index
        self._values: dict[int, dict[str, bytes]] = {}
        ranks = (index for index in range(self._index.world) if index not in self._index.absent)
        trees = {rank: SavedStateTree.parse(images.skeleton(rank)) for rank in ranks}
        self.foreign = all(tree.foreign for tree in trees.values())
        self._paths: dict[str, KeyPath] | None = None
        self._holders: dict[str, int] = {}
        for holder, tree in trees.items():  # of two ranks, the first counts, as for DCP's planner
            if tree.paths is not None:
                self._paths = {**tree.paths, **(self._paths or {})}
            for name in tree.values:
                self._holders.setdefault(name, holder)
        self._boxes = self._chosen(rank, images.nearness_by_rank)

    def _chosen(self, rank: int, nearness: list[int]) -> dict[str, dict[KeyPath, Piece]]:
        """For each tensor, the saved boxes that make it up, by their offsets."""
        named = {
            key: self._index.find_tensor(key)
            for key in (*self._index.tensors, *self._index.aliases)
        }
        saved = {name: tensor for name, tensor in named.items() if tensor is not None}
        requests = [TensorRequest(name, Box.whole(tensor.shape)) for name, tensor in saved.items()]
        try:
            made = make_fill_plan(requests, self._index, rank=rank, nearness=nearness)
        except CoverageError as error:
            raise CoverageError(
                f"{self.where}: {error}\nUse another copy of this step, or load another step."
            ) from error
        boxes: dict[str, dict[KeyPath, Piece]] = {name: {} for name in saved}
        for piece in made.pieces():
            boxes[requests[piece.request].name][piece.at] = piece
        for name, tensor in saved.items():
            if not boxes[name]:  # no elements: any of its boxes is the whole tensor
                holder, begin = tensor.box_rows[0, :2].tolist()
                at, sizes = (0,) * len(tensor.shape), tensor.shape
                boxes[name][at] = Piece(holder, begin, 0, sizes, at, sizes, at)
        return boxes

    def metadata(self) -> Metadata:
        """The `Metadata` for DCP's planners."""
        held: dict[str, STORAGE_TYPES] = {
            name: self._tensor_metadata(name, sorted(boxes)) for name, boxes in self._boxes.items()
        }
        held |= {name: BytesStorageMetadata() for name in self._holders}
        return Metadata(
            state_dict_metadata=held,
            planner_data=self._paths,
            storage_meta=StorageMeta(checkpoint_id=self.where),
        )

    def _tensor_metadata(self, name: str, places: list[KeyPath]) -> TensorStorageMetadata:
        saved, boxes = self._saved(name), self._boxes[name]
        dtype: Any = DTYPE_OF.get(saved.dtype, torch.uint8)
        return TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(saved.shape),
            chunks=[
                ChunkStorageMetadata(torch.Size(place), torch.Size(boxes[place].sizes))  # type: ignore[arg-type]
                for place in places
            ],
        )

    def dtype(self, index: MetadataIndex) -> torch.dtype:
        """The dtype of a saved tensor. Raises FormatError for a dtype that this torch does not
        have."""
        code = self._saved(index.fqn).dtype
        dtype: torch.dtype | None = DTYPE_OF.get(code)
        if dtype is None:
            raise FormatError(f"{self.where}: this torch has no dtype for {code}")
        return dtype

    def find_box_by_index(self, index: MetadataIndex) -> Piece:
        """The saved box that a read item names. Raises FormatError."""
        box = self._boxes.get(index.fqn, {}).get(tuple(index.offset or ()))
        if box is None:
            raise FormatError(f"no box of {index.fqn} at {index.offset}", path=self.where)
        return box

    def holding_rank(self, item: ReadItem) -> int:
        """The saved rank whose image holds what a read item names. Raises FormatError."""
        index = item.storage_index
        if item.type is not LoadItemType.BYTE_IO:
            return self.find_box_by_index(index).rank
        if index.fqn not in self._holders:
            raise FormatError(f"no value {index.fqn}", path=self.where)
        return self._holders[index.fqn]

    def _saved(self, name: str) -> SavedTensor:
        saved = self._index.find_tensor(name)
        if saved is None:
            raise FormatError(f"no tensor {name}", path=self.where)
        return saved

    @classmethod
    def open_through_sidecar(
        cls, link: SidecarSession, step_id: StepId, *, timeout_s: float
    ) -> StepReader:
        """Find the images through the sidecar, and read their headers. `timeout_s`: for one window
        of chunks. Raises SidecarError, ImageError, CoverageError."""
        images = StepImages.locate_step(link, step_id, timeout_s, every=True)
        return cls(images, step_id, where=f"step {step_id}", rank=link.rank)

    @classmethod
    def open(cls, folder: StepFolder) -> StepReader:
        """Read the step from a directory. Raises CoverageError."""
        return cls(folder, folder.id, where=str(folder.path), rank=0)

    def check(self, plan: LoadPlan) -> None:
        """Check that everything in the plan exists, and verify what comes from a directory. What
        comes from a sidecar is verified as it arrives. Raises FormatError, DigestError."""
        tensors, values = _split(plan)
        moves, dtypes = self._moves(tensors)
        holders = {self.holding_rank(item) for item in values}
        if isinstance(self._images, StepFolder):
            self._images.verify(
                [
                    (piece.rank, *byte_range(piece, dtypes[piece.request].itemsize))
                    for piece in moves.pieces()
                ]
                + [self._images.extras_range(rank) for rank in holders]
            )

    def load(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Fill the planner's tensors, and hand it its values.

        Raises SidecarError if a chunk cannot be had; some tensors have changed by then. Raises
        MismatchError for a tensor that is not as planned, and ImageError, before any tensor is
        changed.
        """
        self.check(plan)  # a global plan may have added something
        tensors, values = _split(plan)
        targets = [planner.resolve_tensor(tensor).detach() for tensor in tensors]
        for item, target in zip(tensors, targets, strict=True):
            if tuple(target.shape) != tuple(item.lengths):
                raise MismatchError(
                    f"{item.storage_index.fqn}: {list(item.lengths)} planned,"
                    f" {list(target.shape)} here"
                )
        read = [self._value(item) for item in values]
        moves, dtypes = self._moves(tensors)
        fill_targets(moves, targets, self._images, dtypes)
        if isinstance(self._images, StepImages):
            self._images.check_unchanged()
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        for item, value in zip(values, read, strict=True):
            planner.load_bytes(item, io.BytesIO(value))

    def tier(self, plan: LoadPlan) -> Tier:
        """The farthest tier from which this plan reads."""
        if isinstance(self._images, StepFolder):
            return Tier.LOCAL
        found = self._images.found
        tiers = {found[self.holding_rank(item)].tier for item in plan.items}
        return max(tiers, key=NEAREST_FIRST.index, default=Tier.MEMORY)

    def close(self) -> None:
        """Release the window and the mapped images."""
        self._images.close()

    def _moves(self, items: Sequence[ReadItem]) -> tuple[FillPlan, list[torch.dtype]]:
        """DCP's plan as a plan of `restore.fill_plan`: one want for each item, filled by one
        piece."""
        requests, rows = [], []
        dims = max((len(item.lengths) for item in items), default=0)
        for number, item in enumerate(items):
            box, sizes = self.find_box_by_index(item.storage_index), tuple(item.lengths)
            request = TensorRequest(item.storage_index.fqn, Box.whole(sizes))
            requests.append(request)
            if not request.box.empty:
                padding = [0] * (dims - len(sizes))
                parts = (box.sizes, item.storage_offsets, sizes, request.box.offsets)
                rows.append(
                    [box.rank, box.begin, number, *(n for part in parts for n in (*padding, *part))]
                )
        rows.sort()  # by rank and first byte: the order of the files
        columns = torch.tensor(rows, dtype=torch.int64).view(-1, 3 + 4 * dims)
        return FillPlan(requests, columns, dims), [self.dtype(item.storage_index) for item in items]

    def _value(self, item: ReadItem) -> bytes:
        name, rank = item.storage_index.fqn, self.holding_rank(item)
        if rank not in self._values:
            tree = extras_codec.decode(self._images.extras(rank))
            values = tree.get("dcp") if isinstance(tree, dict) else None
            self._values[rank] = values if isinstance(values, dict) else {}
        value = self._values[rank].get(name)
        if not isinstance(value, bytes):
            where = f"{self.where}, rank {rank}"
            raise FormatError(f"{name}: the header names it, the extras lack it", path=where)
        return value


def _split(plan: LoadPlan) -> tuple[list[ReadItem], list[ReadItem]]:
    """The items that are tensors, and the items that are not."""
    values = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
    return [item for item in plan.items if item.type is not LoadItemType.BYTE_IO], values


_LOST = "rank {}: its plan holds no ballot: it loads by a path, or not at all, or its planner loses"
_LOST += " LoadPlan.storage_data; all ranks must load alike, and a planner keep what is in a plan"


def latest_step() -> int | None:
    """The step that `StorageReader()` would load, as far as this rank's sidecar knows; None at the
    very beginning of a run.

    Raises RestoreError if steps were kept but cannot be found now. So None always means that a
    start at step 0 loses nothing. Waits until the sidecar has looked at all tiers. This is no
    collective, so ranks on several machines may see different steps; `dcp.load` takes the newest
    step that all have.
    """
    session = _joined()
    found = choose_load_step([_ballot(session, None)])
    return None if found is None else found.step


def _joined() -> sessions.DcpSession:
    session = sessions.session()
    session.ensure_joined(*rank_and_world(is_coordinator=False, rank=None))
    return session


def _ballot(session: sessions.DcpSession, step: int | None) -> LoadStepBallot:
    failed = frozenset() if step is not None else frozenset(session.failed)
    return LoadStepBallot(vote=session.candidates(), step=step, failed=failed)


class StorageReader(storage.StorageReader):
    """Loads a committed step.

    With a `path` (or a `checkpoint_id`) that is the directory of a step, it loads that directory,
    no matter which run it belongs to. This needs no sidecar, and has no effect on steps that are
    saved later. Every chunk that any rank needs is verified *before* any rank loads anything.
    To verify needs the package `xxhash`.

    With any other path, it loads the step of the run that the path names (the number at the end of
    its last part), as `StorageWriter(path)` saved it. `step` names it likewise.

    With neither, it loads the run's newest step that the sidecars of all ranks can bring, from
    memory, local volumes, other pods or the archive. The ranks agree on it. Bytes that are not in
    memory are verified chunk by chunk as they arrive. A step that cannot be read completely raises
    on all ranks; some tensors may have changed by then, and the next `dcp.load` takes another step.

    `KEEPSTEP_RESTORE_TIMEOUT` bounds each fetch, as for a `Checkpointer`. The next `dcp.save` goes
    on from the loaded step in a new epoch: later steps of the old epoch are dead.
    """

    def __init__(
        self, path: str | os.PathLike[str] | int | None = None, *, step: int | None = None
    ) -> None:
        if path is not None and step is not None:
            raise UsageError("either a path or a step: a path names one step only")
        self._path: Path | None = None
        self._step = step
        if path is not None:
            self._name(path)
        self._is_coordinator = False
        self._ballot: LoadStepBallot | None = None
        self._opened: StepReader | None = None
        self._loaded: StepId | None = None

    @property
    def loaded_step(self) -> int | None:
        """The step that was loaded last, the same on all ranks; None before the first load."""
        return None if self._loaded is None else self._loaded.step

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """Begin a load. Raises UsageError for an id that is no directory and names no step."""
        self._opened = self._ballot = self._loaded = None
        if checkpoint_id is not None:
            self._name(checkpoint_id)

    def _name(self, path: str | os.PathLike[str] | int) -> None:
        """Set what to load: a directory, or a step of the run."""
        self._path = self._step = None
        if not isinstance(path, int) and is_shard_directory(Path(path)):
            self._path = Path(path)
        else:
            self._step = step_number_of(path)

    # no **kwargs: with them, DCP would call this a second time, for the metadata of one rank, and
    # hide the error
    def read_metadata(self) -> Metadata:
        """Read all headers of the step: of the directory, or of the newest step that this rank's
        sidecar can bring.

        Raises RestoreError (there is no such step, or it is incomplete), ImageError, CoverageError,
        SidecarError. Newer versions of torch wrap these in an AssertionError with the same text.
        """
        if self._path is not None:
            self._opened = StepReader.open(StepFolder(self._path))
        else:
            self._opened = self._newest(_joined())
        return self._opened.metadata()

    def _newest(self, session: sessions.DcpSession) -> StepReader:
        """The newest step whose headers can be read. Steps whose headers cannot be read do not get
        this rank's vote."""
        self._ballot = _ballot(session, self._step)
        why: Exception | None = None
        while True:
            try:
                step_id = choose_load_step([self._ballot])
            except RestoreError as error:
                raise (type(error)(f"{error}. The last attempt: {why}") if why else error) from why
            if step_id is None:
                raise RestoreError(
                    "no committed step to load: keepstep.dcp.latest_step() is None when a run"
                    " begins, and `keepstep steps` lists what is there"
                )
            try:
                return _reach(session, step_id)
            except SidecarAbsent:
                raise
            except (SidecarError, CoverageError, ImageError) as error:
                log.warning(
                    "keepstep: step %d is not used: %s [restore.step_refused]", step_id.step, error
                )
                why = error
                self._ballot = replace(self._ballot, failed=self._ballot.failed | {step_id})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Note whether this rank is the coordinator. `read_metadata` has already read the
        metadata."""
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check everything that this rank will read, and put its ballot into its plan.

        Raises DigestError; then nothing is loaded on any rank.
        """
        self._step_at_hand.check(plan)
        return replace(plan, storage_data=self._ballot or self._step_at_hand.id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Decide on the step for all ranks (coordinator only). Raises UsageError, RestoreError."""
        if self._path is not None:
            _check_same(plans)
            return plans
        ballots = [plan.storage_data for plan in plans]
        for rank, ballot in enumerate(ballots):
            if not isinstance(ballot, LoadStepBallot):
                raise UsageError(_LOST.format(rank))
        step_id = choose_load_step(ballots)
        assert step_id is not None, "this rank has planned for one"
        return [replace(plan, storage_data=step_id) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load the agreed step into the planner's tensors. Raises ImageError, RestoreError."""
        opened = self._step_at_hand
        if self._path is None:
            self._read_agreed(opened, plan, planner)
        else:
            opened.load(plan, planner)
        self._loaded = self._step_at_hand.id
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_agreed(self, opened: StepReader, plan: LoadPlan, planner: LoadPlanner) -> None:
        if not isinstance(plan.storage_data, StepId):
            raise UsageError(_LOST.format("this one"))
        session, step_id = sessions.session(), plan.storage_data
        try:
            if opened.id != step_id:
                opened, plan = self._again(session, opened, plan, planner)
            opened.load(plan, planner)
        except (SidecarError, CoverageError, ImageError) as error:
            session.failed.add(step_id)
            raise RestoreError(
                f"step {step_id} was not read to the end: {error}. Tensors may be changed in"
                " part: call"
                " dcp.load again, which takes another step, or StorageReader(step=...) to try this"
                " one again"
            ) from error
        finally:
            opened.close()
        session.note_loaded_step(step_id, opened.tier(plan))

    def _again(
        self,
        session: sessions.DcpSession,
        planned: StepReader,
        plan: LoadPlan,
        planner: LoadPlanner,
    ) -> tuple[StepReader, LoadPlan]:
        """The agreed step, and a plan for it. The existing plan is used again if both steps look
        alike."""
        planned.close()
        step_id = plan.storage_data
        self._opened = opened = _reach(session, step_id)
        metadata = opened.metadata()
        before = planned.metadata()
        if (metadata.state_dict_metadata, metadata.planner_data) == (
            before.state_dict_metadata,
            before.planner_data,
        ):
            return opened, plan
        return opened, self._replanned(planner, metadata, step_id)

    def _replanned(self, planner: LoadPlanner, metadata: Metadata, step_id: StepId) -> LoadPlan:
        if not isinstance(planner, DefaultLoadPlanner):
            raise UsageError(
                f"all ranks have step {step_id}, this one planned for a newer step of other"
                " shapes or"
                f" names, and {type(planner).__name__} cannot plan again: name the step,"
                f" StorageReader(step={step_id.step})"
            )
        planner.set_up_planner(planner.original_state_dict, metadata, self._is_coordinator)
        plan = planner.finish_plan(planner.create_local_plan())
        self._step_at_hand.check(plan)
        return plan

    @property
    def _step_at_hand(self) -> StepReader:
        if self._opened is None:
            raise UsageError("read_metadata() comes first")
        return self._opened

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the id is a directory of a step, or names a step."""
        return is_shard_directory(Path(checkpoint_id)) or has_step_number(checkpoint_id)


def _reach(session: sessions.DcpSession, step_id: StepId) -> StepReader:
    link = session.save_thread.session
    reached = StepReader.open_through_sidecar(link, step_id, timeout_s=restore_timeout_s())
    if reached.foreign:
        log.warning(
            "keepstep: step %s was saved by keepstep.Checkpointer: its tensors can be loaded under"
            " its names (component.parameter), nothing else of it; keepstep.Checkpointer restores"
            " all [dcp.checkpointer_step_read]",
            step_id,
        )
    return reached


def _check_same(plans: list[LoadPlan]) -> None:
    for rank, plan in enumerate(plans):
        if plan.storage_data != plans[0].storage_data:
            raise UsageError(
                f"rank 0 loads step {plans[0].storage_data}, rank {rank} step"
                f" {plan.storage_data}: name one, StorageReader(step=...)"
            )
