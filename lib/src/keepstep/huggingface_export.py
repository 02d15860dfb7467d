"""Writes a step as a directory that Hugging Face's libraries load: safetensors files and their
index.

Boxes from any world and layout are put together as in a restore: one plan over all images. The
chunks of the plan are read once each, in the order of the files, and copied into mappings of the
new files (and converted, if that is asked for). So an export takes the memory of a few chunks,
however large the step is. Bytes come from a `Read`, which gives only verified chunks.

The directory grows under a hidden name, and is renamed when it is complete and on the medium. So a
directory that has its final name is complete. Space is allocated first, because a disk that fills
up under a mapping would end the process.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepstep.dcp.session import SavedStateTree
from keepstep.directory import OpenDirectory
from keepstep.errors import RestoreError, StorageError, UsageError, few
from keepstep.image import Layout, TensorRole, add_rank_suffix
from keepstep.image.layout import CHUNK_BYTES
from keepstep.image.tensor_specs import NATIVE_BYTES
from keepstep.restore import fill_plan
from keepstep.restore.fill_plan import Box, IndexBuilder, SavedTensor
from keepstep.restore.images import W, fill_targets, list_chunks_in_plan_order
from keepstep.state.taken_state import CODE_OF, DTYPE_OF, Node, parse_skeleton
from keepstep.steps import StepId

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The dtypes that floating point numbers can be converted to, by their names in the command."""

Read = Callable[[int, int, memoryview], None]
"""`read(rank, chunk, into)` fills the beginning of a buffer of CHUNK_BYTES with a verified chunk of
the image of a saved rank. Called from several threads. Raises StorageError, ImageError."""

_BUFFERS = 6
_KEPT_CHUNKS = 8
"""After this many chunks, the written pages of the new files are dropped from this process."""

_INDEX = "model.safetensors.index.json"

ADAPTER = "adapter"
"""`only` for the parameters that an optimizer trains, as PEFT's `adapter_model.safetensors`, unless
a component has this name."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of an export.

    `tied`: other names of a tensor that is written once, with the name under which it is written.
    `left_out`: what is not a tensor. `own`: tensors that each rank, or each group of ranks, has for
    itself with other values; the lowest rank's values were taken.
    """

    path: Path
    files: tuple[str, ...]
    tensors: int
    bytes: int
    tied: Mapping[str, str]
    left_out: tuple[str, ...]
    own: tuple[str, ...]


@dataclass
class _Component:
    """One component of the step, as the images describe it.

    `names`: for the name of each tensor in the user's object, the stored name. `own`: for such a
    name, the stored names of the other tensors that further ranks have under it. `shapes`: by
    stored name, the shapes that flat vectors have in the user's object. `values`: names of what is
    not a tensor. `trained`: whether it has parameters.
    """

    names: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    values: set[str] = field(default_factory=set)
    own: dict[str, dict[str, None]] = field(default_factory=dict)
    trained: bool = False


class ComponentExporter:
    """Exports one component of a step into a directory."""

    def __init__(
        self,
        layouts: Iterable[Layout],
        *,
        run: str,
        step_id: StepId,
        only: str | None = None,
        dtype: torch.dtype | None = None,
        shard_bytes: int,
        lowest_rank: bool = False,
    ) -> None:
        """`layouts`: of all saved ranks, ascending, then of their bases. `only`: the component to
        export, or `ADAPTER`; None for the only one with parameters, or the one named `model`.
        `shard_bytes`: the maximum size of a file, unless a single tensor is larger.
        `lowest_rank`: of tensors that each rank has for itself, take the lowest rank's even if the
        values of other ranks differ.

        Raises UsageError for a component that does not exist or a dtype that safetensors lacks, and
        FormatError or CoverageError if the images do not make up the component's tensors.
        """
        components: dict[str, _Component] = {}
        index, found = None, list(layouts)
        bases = {layout.rank: layout for layout in found if layout.is_base}
        for layout in found:
            index = index or IndexBuilder(layout.world)
            index.add_image(layout)
            if not layout.is_base:
                _collect(components, layout.merge_with_base(bases.get(layout.rank)))
        if index is None:
            raise UsageError(f"step {step_id} has no image")
        self.index = index.build()
        self.is_adapter = only == ADAPTER and ADAPTER not in components
        self.component = _chosen(components, None if self.is_adapter else only, step_id)
        self._id, self._lowest_rank = step_id, lowest_rank
        self._about = {"run": run, "step": str(step_id), "component": self.component}
        self._of = components[self.component]
        if self.is_adapter:
            self._of, shard_bytes = _adapter(self._of, found, step_id), sys.maxsize
        self._saved, self._tied = self._distinct()
        self._dtypes = {name: _dtype_of(tensor) for name, tensor in self._saved.items()}
        self._files = _divided([self._entry(name, dtype) for name in self._saved], shard_bytes)
        self._read_dtypes = list(self._dtypes.values())
        self._plan = self._made(
            [
                fill_plan.TensorRequest(tensor.name, Box.whole(tensor.shape))
                for tensor in self._saved.values()
            ]
        )

    @property
    def total_bytes(self) -> int:
        """The bytes that will be read, in whole chunks."""
        runs = list_chunks_in_plan_order(self._plan, self._read_dtypes, _Chunks(lambda *_: None))
        return sum(run.end - run.first for run in runs) * CHUNK_BYTES

    def write(self, target: Path, read: Read, on_bytes: Callable[[int], None]) -> Exported:
        """Write into `target`, which is created.

        Raises UsageError for a directory that holds anything, and for values that differ where one
        rank's were to stand for all. Raises StorageError if the disk is full or fails, and whatever
        `read` raises. After an error, nothing is left.
        """
        target = Path(os.path.realpath(target))
        _check_new(target)
        stem = "adapter_model" if self.is_adapter else "model"
        files = _named(self._files, self._about, stem)
        own = self._differing(read)
        if own and not self._lowest_rank:
            raise UsageError(_not_one(own, self._id))
        try:
            with _staged_directory(target) as directory:
                self._fill(directory, files, read, on_bytes)
        except OSError as error:
            raise StorageError(_why(error, target, files)) from error
        return Exported(
            path=target,
            files=tuple(file.name for file in files),
            tensors=len(self._saved),
            bytes=sum(file.size_bytes for file in files),
            tied=self._tied,
            left_out=tuple(sorted(self._of.values)),
            own=own,
        )

    def _fill(
        self,
        growing: OpenDirectory,
        files: list[_File],
        read: Read,
        on_bytes: Callable[[int], None],
    ) -> None:
        with contextlib.ExitStack() as stack:
            mapped = [stack.enter_context(_mapping(growing, file)) for file in files]
            views = {
                entry.name: view
                for file, mapping in zip(files, mapped, strict=True)
                for entry, view in file.views(mapping)
            }
            images = _Chunks(read, on_bytes, mapped)
            targets = [views.pop(name).view(self._saved[name].shape) for name in self._saved]
            fill_targets(self._plan, targets, images, self._read_dtypes)
            del targets
        if len(files) > 1:
            _write_text(growing, _INDEX, _index_of(files))

    # --- tensors that each rank has for itself ---------------------------------------------------

    def _differing(self, read: Read) -> tuple[str, ...]:
        """The names under which ranks have tensors of their own that are not bitwise equal."""
        images = _Chunks(read)
        found = []
        for name, others in self._of.own.items():
            taken = self._stored(name, self._of.names[name])
            if not all(self._equal(taken, self._stored(name, other), images) for other in others):
                found.append(name)
        return tuple(sorted(found))

    def _equal(self, first: SavedTensor, other: SavedTensor, images: _Chunks) -> bool:
        """Whether two saved tensors are bitwise equal. Takes the memory of both."""
        if (first.dtype, first.shape) != (other.dtype, other.shape):
            return False
        dtypes = [_dtype_of(first)] * 2
        targets = [torch.empty(first.shape, dtype=dtype) for dtype in dtypes]
        requests = [
            fill_plan.TensorRequest(saved.name, Box.whole(first.shape)) for saved in (first, other)
        ]
        fill_targets(self._made(requests), targets, images, dtypes)
        return torch.equal(*(target.reshape(-1).view(torch.uint8) for target in targets))

    def _stored(self, name: str, stored: str) -> SavedTensor:
        saved = self.index.find_tensor(stored)
        if saved is None:
            raise RestoreError(f"{name}: the step's tree names it, but no image holds it")
        return saved

    # --- what to write -------------------------------------------------------------------------

    def _distinct(self) -> tuple[dict[str, SavedTensor], dict[str, str]]:
        """Every tensor once, by its first name; and for each other name of a tensor, the
        first one."""
        saved: dict[str, SavedTensor] = {}
        first: dict[str, str] = {}
        tied: dict[str, str] = {}
        for name, stored in self._of.names.items():
            tensor = self._stored(name, stored)
            if first.setdefault(tensor.name, name) == name:
                saved[name] = tensor
            else:
                tied[name] = first[tensor.name]
        return saved, tied

    def _entry(self, name: str, dtype: torch.dtype | None) -> _Entry:
        kept, saved = self._dtypes[name], self._saved[name]
        converted = dtype is not None and kept.is_floating_point
        shape = self._of.shapes.get(saved.name, saved.shape)
        return _Entry(name, dtype if converted and dtype else kept, shape)

    def _made(self, requests: list[fill_plan.TensorRequest]) -> fill_plan.FillPlan:
        """A plan to read boxes; all images are equally near, and none is mapped."""
        return fill_plan.make_fill_plan(
            requests, self.index, rank=0, nearness=[1] * (2 * self.index.world)
        )


def _not_one(names: tuple[str, ...], step_id: StepId) -> str:
    return (
        f"step {step_id}: ranks have values of their own in {few(names, 6)}; the values of one"
        " rank are"
        " not the whole model's where they are slices (tensor parallelism without DTensor), which"
        " cannot be put together by name. Where the lowest rank's are right, as of buffers that"
        " each rank counts by itself: --lowest-rank"
    )


# --- components ------------------------------------------------------------------------------


def _collect(components: dict[str, _Component], layout: Layout) -> None:
    """Add what one rank's image has of each component."""
    for component, name, stored in _leaves(layout):
        part = components.setdefault(component, _Component())
        if stored is None:
            part.values.add(name)
            continue
        name = _bare(name)
        kept = layout.aliases.get(stored, stored)
        if kept in layout.entries:
            spec = layout.entries[kept].spec
            part.trained = part.trained or spec.section is TensorRole.PARAMS
            if spec.unflattened is not None:
                part.shapes[kept] = spec.unflattened
        if part.names.setdefault(name, kept) != kept:
            part.own.setdefault(name, {})[kept] = None


def _adapter(part: _Component, layouts: Iterable[Layout], step_id: StepId) -> _Component:
    """What of a component an optimizer trains, under the names that PEFT gives it. Raises
    UsageError."""
    trained = {
        layout.aliases.get(name, name)
        for layout in layouts
        for parameters in layout.parameters.values()
        for name, _ in parameters
    }
    names = {_peft(name): stored for name, stored in part.names.items() if stored in trained}
    if not names or len(names) == len(part.names):
        how = "all of" if names else "no parameter of"
        raise UsageError(
            f"step {step_id} has no adapter: the optimizers train {how} the component; leave out"
            " --only"
        )
    own = {_peft(name): others for name, others in part.own.items() if _peft(name) in names}
    return _Component(names=names, shapes=part.shapes, own=own, trained=True)


def _peft(name: str) -> str:
    """A parameter's name as in PEFT's files: without the name of the adapter, `default`."""
    name = name.replace(".modules_to_save.default.", ".")
    *above, last = name.split(".")
    if last == "default":  # of a parameter
        return ".".join(above)
    if above and above[-1] == "default":  # of a module
        name = ".".join([*above[:-1], last])
    return name.removesuffix(".weight") if name.endswith("lora_magnitude_vector.weight") else name


def _bare(name: str) -> str:
    """The name without the rank that it carries if other ranks have another tensor of that name."""
    bare, _, rank = name.rpartition("@rank-")
    return bare if bare and rank.isdecimal() and name == add_rank_suffix(bare, int(rank)) else name


def _leaves(layout: Layout) -> Iterator[tuple[str, str, str | None]]:
    """For each leaf: its component, its name in the component, and the stored name of the tensor;
    None if it is not a tensor."""
    tree = SavedStateTree.parse(layout.skeleton)
    if not tree.foreign:
        paths = tree.paths or {}
        stored = dict.fromkeys(entry.spec.tensor or name for name, entry in layout.entries.items())
        for name in (*stored, *layout.aliases, *tree.values):
            path = paths.get(name, (name,))
            component = str(path[0]) if len(path) > 1 else ""
            value = name in tree.values
            yield component, name.removeprefix(f"{component}."), None if value else name
        return
    for component, node in parse_skeleton(layout.skeleton).items():
        for place, leaf in _of_node(node, component):
            yield component, (leaf or place).removeprefix(f"{component}."), leaf


def _of_node(node: Node, path: str) -> Iterator[tuple[str, str | None]]:
    """The leaves below a node: their paths, with the stored name of a tensor, or None for a value.
    The bytes of an array count as a value."""
    kind = node[0]
    if kind == "t":
        yield path, node[1]
    elif kind == "v" or (kind == "x" and node[2][0] == "t"):
        yield path, None
    elif kind == "x":
        yield from _of_node(node[2], path)
    else:
        children = node[1] if kind == "d" else enumerate(node[1])
        for key, child in children:
            yield from _of_node(child, f"{path}.{key}")


def _chosen(components: Mapping[str, _Component], only: str | None, step_id: StepId) -> str:
    names = [name for name, component in components.items() if component.names]
    if only is not None and only in names:
        return only
    trained = [name for name in names if components[name].trained] or names
    if only is None and (len(trained) == 1 or "model" in trained):
        return trained[0] if len(trained) == 1 else "model"
    there = few([name or "(without a name)" for name in names], 10) or "none"
    if only is None:
        raise UsageError(
            f"step {step_id} has several components with tensors: choose by --only: {there}"
        )
    raise UsageError(f"step {step_id} has no component {only!r} with tensors; it has: {there}")


def _dtype_of(saved: SavedTensor) -> torch.dtype:
    found: torch.dtype | None = DTYPE_OF.get(saved.dtype)
    if saved.dtype not in NATIVE_BYTES or found is None:
        raise UsageError(
            f"{saved.name}: safetensors, or this torch, has no {saved.dtype}, so it cannot be"
            " exported; choose another component with --only"
        )
    return found


# --- files -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _File:
    """A safetensors file: `header`, followed by the entries without gaps."""

    name: str
    header: bytes
    entries: tuple[_Entry, ...]

    @property
    def size_bytes(self) -> int:
        return len(self.header) + sum(entry.size_bytes for entry in self.entries)

    def views(self, mapping: mmap.mmap) -> Iterator[tuple[_Entry, Tensor]]:
        """For each entry, a tensor over its bytes in the mapping."""
        flat, at = torch.frombuffer(mapping, dtype=torch.uint8), len(self.header)
        for entry in self.entries:
            yield entry, flat[at : at + entry.size_bytes].view(entry.dtype).view(entry.shape)
            at += entry.size_bytes


def _divided(entries: list[_Entry], shard_bytes: int) -> list[list[_Entry]]:
    """The entries, divided among files in the order of names in the user's object, as Hugging
    Face's own writer does."""
    files: list[list[_Entry]] = [[]]
    for entry in entries:
        if files[-1] and sum(e.size_bytes for e in files[-1]) + entry.size_bytes > shard_bytes:
            files.append([])
        files[-1].append(entry)
    return files


def _named(divided: list[list[_Entry]], about: Mapping[str, str], stem: str) -> list[_File]:
    if len(divided) == 1:
        return [_file(f"{stem}.safetensors", divided[0], about)]
    count = len(divided)
    return [
        _file(f"{stem}-{number:05d}-of-{count:05d}.safetensors", entries, about)
        for number, entries in enumerate(divided, start=1)
    ]


def _file(name: str, entries: list[_Entry], about: Mapping[str, str]) -> _File:
    # the widest dtypes first, so that each entry begins at a multiple of its element size
    placed = tuple(sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name)))
    # transformers refuses files that do not say which library wrote them
    if any(entry.name == "__metadata__" for entry in placed):
        raise UsageError("a tensor called __metadata__ cannot be in a file of safetensors")
    tree: dict[str, Any] = {"__metadata__": {"format": "pt", "keepstep": json.dumps(about)}}
    at = 0
    for entry in placed:
        tree[entry.name] = {
            "dtype": CODE_OF[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at := at + entry.size_bytes],
        }
    text = json.dumps(tree, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return _File(name, len(text).to_bytes(8, "little") + text, placed)


def _index_of(files: list[_File]) -> str:
    total = sum(entry.size_bytes for file in files for entry in file.entries)
    places = {entry.name: file.name for file in files for entry in file.entries}
    tree = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(tree, indent=2) + "\n"


# --- the directory ---------------------------------------------------------------------------


def _check_new(target: Path) -> None:
    """Raise UsageError unless there is nothing, or an empty directory."""
    if target.is_mount():
        raise UsageError(f"{target} is a mount point: name a directory in it, to be made")
    try:
        there = sorted(os.listdir(target))
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise UsageError(f"{target} is a file; name a directory that is to be made") from None
    if there:
        raise UsageError(
            f"{target} is not empty ({few(there, 4)}) and stays as it is: name another"
            " directory, or move this one away"
        )


@contextlib.contextmanager
def _staged_directory(target: Path) -> Iterator[OpenDirectory]:
    """A hidden directory, which becomes `target` when the block ends and is removed if it
    raises."""
    place = OpenDirectory.open_path(target.parent, make=True)
    name = f".{target.name}.exporting-{os.getpid()}"
    if not place.make(name):
        raise UsageError(f"{place.path / name} is there already: move it away")
    try:
        growing = place.open_subdirectory(name)
        yield growing
        growing.sync()
        place.rename(name, target.name)  # from now on, readers see a complete directory
        place.sync()
    except BaseException:
        with contextlib.suppress(OSError):
            place.remove(name)
        raise


@contextlib.contextmanager
def _mapping(directory: OpenDirectory, file: _File) -> Iterator[mmap.mmap]:
    """Create the file with all its blocks, and map it. It is on the medium when the block ends."""
    fd = directory.open_file(file.name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.posix_fallocate(fd, 0, file.size_bytes)
        os.pwrite(fd, file.header, 0)
        mapping = mmap.mmap(fd, file.size_bytes)
        yield mapping
        mapping.flush()
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_text(directory: OpenDirectory, name: str, text: str) -> None:
    fd = directory.open_file(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _why(error: OSError, target: Path, files: list[_File]) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        needed = sum(file.size_bytes for file in files)
        return (
            f"{target}: no space for {needed} bytes ({error.strerror}); nothing is left of it. Free"
            " some, name a directory on another drive, or take less with --dtype bf16"
        )
    return f"cannot write {target}: {error}"


# --- chunks ----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Chunks:
    """The `Bytes` of the images: chunks that come from `read`, some of them ahead of the chunk that
    is copied.

    `written`: mapped files. The kernel writes back their pages, which need not stay in this
    process.
    """

    read: Read
    on_bytes: Callable[[int], None] = lambda _: None
    written: list[mmap.mmap] = field(default_factory=list)

    def mapped_bytes(self, rank: int) -> Tensor | None:
        """None: everything is read in chunks."""
        return None

    def iter_chunks(self, requests: Iterable[W]) -> Iterator[tuple[W, Tensor]]:
        """See `Bytes`."""
        chunks, count = iter(requests), 0
        free = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(_BUFFERS)]
        flying: deque[tuple[W, mmap.mmap, Future[None]]] = deque()
        with ThreadPoolExecutor(_BUFFERS, thread_name_prefix="keepstep-export") as pool:
            while True:
                for chunk in islice(chunks, len(free)):
                    buffer = free.pop()
                    done = pool.submit(self.read, chunk.rank, chunk.chunk, memoryview(buffer))
                    flying.append((chunk, buffer, done))
                if not flying:
                    break
                chunk, buffer, done = flying.popleft()
                done.result()
                yield chunk, torch.frombuffer(buffer, dtype=torch.uint8)
                free.append(buffer)
                self.on_bytes(CHUNK_BYTES)
                count += 1
                if count % _KEPT_CHUNKS == 0:
                    for mapping in self.written:
                        mapping.madvise(mmap.MADV_DONTNEED)
