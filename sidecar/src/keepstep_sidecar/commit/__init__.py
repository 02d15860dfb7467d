"""From *sealed* to *committed*.

    inventory        what is held where, and what the ledger is told of it
    committer        executes what core.node decides: writes, publishes, retires; begins epochs
    eviction_status  the warning about full volumes
    epochs           which epochs belong to this run
    operator_link    whether the operator answers; a record of what it said
    remote_tiers     runs the peers and the archive, and asks what they hold
    restore_from     going back to a step that a person named
    script_failures  the failures of the script that make a step suspect

The picture: docs/architecture.md.
"""
