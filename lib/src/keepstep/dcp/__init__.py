"""`torch.distributed.checkpoint` over keepstep: a storage writer and a storage reader for the stock
`dcp.save`, `dcp.async_save` and `dcp.load`, in place of FileSystemWriter and FileSystemReader.

    import torch.distributed.checkpoint as dcp
    import keepstep.dcp

    state = {"app": AppState(model, optimizer)}        # as for any other storage
    if keepstep.dcp.latest_step() is not None:
        reader = keepstep.dcp.StorageReader()
        dcp.load(state, storage_reader=reader)          # go on from reader.loaded_step
    dcp.save(state, storage_writer=keepstep.dcp.StorageWriter("out/step-100"))
    future = dcp.async_save(state, storage_writer=keepstep.dcp.StorageWriter("out/step-200"),
                            process_group=gloo)         # dist.new_group(backend="gloo")

A path names a step of the run: the number at the end of the path's last part. Nothing is written at
that path.

Each rank's plan items become one image in a slot, and the sidecar does the rest, as for a
`Checkpointer`. `dcp.save` returns when the step is committed. DCP's pickled `.metadata` is not
written, because the headers of the images hold the same facts. `StorageReader()` gets headers and
bytes from the sidecar, on whatever tier the step is; `StorageReader(directory)` needs no sidecar.

Differences to a `Checkpointer`:

- The planner decides what is saved, and by which rank.
- Errors are never hidden: `dcp.save` raises.
- DCP's planner, not keepstep, pickles and unpickles values that are not tensors.
- Random states are kept only if they are in the state dict.

The run's retention retires steps, like all other steps: pin or archive what must stay. One process
uses either keepstep.dcp or a `Checkpointer`, because a rank has one lease.
"""

from keepstep.dcp.reader import StorageReader, latest_step
from keepstep.dcp.session import close
from keepstep.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter", "close", "latest_step"]
