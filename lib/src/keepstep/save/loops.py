"""Whose training loop this is: that of a framework for which keepstep has an adapter?

Asked by looking at the calls that are under way, which no framework needs to be imported for: a
`Checkpointer` that restores or saves inside `Trainer.train()` is within a loop that it cannot see.
"""

from __future__ import annotations

import sys

ADAPTERS = {
    "transformers.trainer": "keepstep.integrations.transformers",
    "lightning.pytorch.trainer.trainer": "keepstep.integrations.lightning",
    "pytorch_lightning.trainer.trainer": "keepstep.integrations.lightning",
    "torchtitan.trainer": "keepstep.integrations.torchtitan",
}
"""By the module in which a framework's loop is."""


def adapter() -> str:
    """The adapter for the loop that this call comes from; empty where the loop is the script's own,
    and where the adapter is imported: who does so uses it, or knows of it."""
    frame = sys._getframe(1)
    while frame is not None:
        found = ADAPTERS.get(frame.f_globals.get("__name__", ""), "")
        if found:
            return "" if found in sys.modules else found
        frame = frame.f_back  # type: ignore[assignment]
    return ""
