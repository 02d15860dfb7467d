"""From *sealed* to *committed*.

    inventory        what is held where, and what the ledger is told of it
    node_host        feeds core.node and executes what it decides: writes images from slots to
                     volumes, publishes and deletes steps there, begins epochs
    lineage          which epochs belong to this run, and which step a restart goes on from
    leader_notes     whether the leader answers; a record of what it said
    remote_tiers     runs the peers and the archive, and asks what they hold

The picture: docs/architecture.md.
"""
