"""Finds out whether a framework for which keepstep has an adapter owns the training loop.

It looks at the call stack, so no framework needs to be imported. A `Checkpointer` that restores or
saves inside `Trainer.train()` is in a loop that it does not control.
"""

from __future__ import annotations

import sys

ADAPTERS = {
    "transformers.trainer": "keepstep.integrations.transformers",
    "lightning.pytorch.trainer.trainer": "keepstep.integrations.lightning",
    "pytorch_lightning.trainer.trainer": "keepstep.integrations.lightning",
    "torchtitan.trainer": "keepstep.integrations.torchtitan",
}
"""The adapter for each module that contains a framework's loop."""


def adapter() -> str:
    """The adapter for the loop that makes this call.

    Empty if the loop is the script's own, or if the adapter is already imported: then the script
    uses it, or knows of it.
    """
    frame = sys._getframe(1)
    while frame is not None:
        found = ADAPTERS.get(frame.f_globals.get("__name__", ""), "")
        if found:
            return "" if found in sys.modules else found
        frame = frame.f_back  # type: ignore[assignment]
    return ""
