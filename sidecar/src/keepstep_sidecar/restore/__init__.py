"""What the sidecar does for a restore.

    restorer    which steps can be restored; brings one into a slot
    prefetch    the same before a trainer asks
    fetch       the nearest copy that verifies
    sources     where all images of a step are
    chunks      verified chunks of them; broadcast   each once for all ranks of this machine

The picture: docs/architecture.md.
"""
