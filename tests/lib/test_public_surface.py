"""What `import keepstep` offers: the errors that training code can meet, and what needs torch."""

from __future__ import annotations

import keepstep
from keepstep import errors

_NAMED_BY_OTHERS_ONLY = {
    "ImageError", "FormatError", "TornError", "ForeignError", "VersionError",
    "StorageError", "NoSpaceError", "ProtocolError", "NoMemoryError",
}  # fmt: skip
"""Of files and of the sidecar's own work: `keepstep.errors` has them for whoever looks closer."""


def test_every_error_of_restore_wait_and_close_can_be_caught_by_its_name() -> None:
    classes = [var for var in vars(errors).values() if isinstance(var, type)]
    known = {class_.__name__ for class_ in classes if class_.__module__ == errors.__name__}
    known -= {*_NAMED_BY_OTHERS_ONLY}
    assert set(keepstep.__all__) == known | {"Batches", "Checkpointer", "CompileCache", "Restored"}
    for name in known:
        assert getattr(keepstep, name) is getattr(errors, name)
