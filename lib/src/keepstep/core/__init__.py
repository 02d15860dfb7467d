"""The decisions, and nothing else: no I/O, no clock, no torch.

    node              one machine of a run: facts in, actions out; combines the parts below
    shard             the value that all parts use
    slot_table        which shared-memory slot is filled next
    schedule          which steps are written and archived, and when
    retention         which steps may be deleted
    suspicion         which steps are suspect because the script failed after them
    restore_vote      what a rank can restore, when it may vote, and the step that all ranks choose
    staging_interval  how often a step is staged
    history           what happened to a run, and its statistics
    commit_rule       which steps are committed, whole, or at risk
    ledger            the same from reports alone, and what a restart would do

For an overview see docs/architecture.md.
"""
