"""`torch.distributed.checkpoint` over keepstep: a storage writer and a storage reader for the stock
`dcp.save`, `dcp.async_save` and `dcp.load`, in the place of FileSystemWriter and FileSystemReader.

    import torch.distributed.checkpoint as dcp
    import keepstep.dcp

    state = {"app": AppState(model, optimizer)}        # as for any other storage
    if keepstep.dcp.latest_step() is not None:
        reader = keepstep.dcp.StorageReader()
        dcp.load(state, storage_reader=reader)          # reader.loaded_step: from where to go on
    dcp.save(state, storage_writer=keepstep.dcp.StorageWriter("out/step-100"))
    future = dcp.async_save(state, storage_writer=keepstep.dcp.StorageWriter("out/step-200"),
                            process_group=gloo)         # dist.new_group(backend="gloo")

A path names a step of the run: the number that its last part ends with. Nothing is written there.

Each rank's plan items become one image in a slot, and the sidecar does the rest, as for a
`Checkpointer`; `dcp.save` returns when the step is committed. DCP's pickled `.metadata` is not
written: what it would say stands in the images' headers. `StorageReader()` gets these, and the
bytes, from the sidecar, wherever the step is; `StorageReader(directory)` needs none.

What differs from a `Checkpointer`: the planner decides what is saved and by whom, nothing of it is
fail-open (`dcp.save` raises), values that are no tensors are pickled and unpickled by DCP's planner
(not by keepstep), and random states are kept only if they are in the state dict. Steps are retired
by the run's retention, as all steps are: what must stay is pinned or archived. One process uses
either these or a `Checkpointer`, as a rank has one lease.
"""

from keepstep.dcp.reader import StorageReader, latest_step
from keepstep.dcp.reader import newest_step as newest_step  # the name that it had
from keepstep.dcp.session import close
from keepstep.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter", "close", "latest_step"]
