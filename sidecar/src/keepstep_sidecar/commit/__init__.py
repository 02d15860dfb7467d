"""From *sealed* to *committed*.

    inventory        what is held where, and what the ledger is told of it
    committer        feeds core.node and executes what it decides; begins epochs
    image_writer     writes images from slots to volumes
    step_directories publishes and deletes steps on the volumes
    epochs           which epochs belong to this run
    operator_link    whether the operator answers; a record of what it said
    remote_tiers     runs the peers and the archive, and asks what they hold
    restart_step     which step a restart goes on from: by a person's wish, or after failures

The picture: docs/architecture.md.
"""
