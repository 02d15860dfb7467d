"""From *sealed* to *committed*.

    inventory      what is held where, and what the ledger is told of it
    persister      writes staged images to the volumes
    committer      hosts the ledger: publishes committed steps, retires old ones, begins epochs
    eviction       makes room on a full drive
    epochs         which epochs are this run's own
    run_view       what the operator knows of the whole run
    remote_tiers   runs the peers and the archive; when a vote may begin
    restore_from   going back to a step that a person named

The picture: docs/architecture.md.
"""
