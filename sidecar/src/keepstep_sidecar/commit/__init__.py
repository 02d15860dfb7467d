"""From *sealed* to *committed*.

    inventory        what is held where, and what the ledger is told of it
    committer        executes what core.node decides: writes, publishes, retires; begins epochs
    eviction_status  what is said of a full drive
    epochs           which epochs are this run's own
    operator_link    whether the operator answers; what it said, on record
    remote_tiers     runs the peers and the archive, and asks what they hold
    restore_from     going back to a step that a person named
    script_failures  what makes a step suspect

The picture: docs/architecture.md.
"""
