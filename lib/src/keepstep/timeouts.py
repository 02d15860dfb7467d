"""How long a restore may take, as the environment of the training process says."""

from __future__ import annotations

import math
import os

from keepstep.errors import UsageError
from keepstep.protocol import RESTORE_TIMEOUT_ENV

RESTORE_S = 600.0


def restore_timeout_s() -> float:
    """Seconds for bringing one rank's image, or one window of others'. Raises UsageError."""
    text = os.environ.get(RESTORE_TIMEOUT_ENV) or str(RESTORE_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < math.inf:
        raise UsageError(f"{RESTORE_TIMEOUT_ENV}={text}: it is a number of seconds above 0")
    return seconds
