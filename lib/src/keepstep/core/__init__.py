"""The decisions, and nothing else: no I/O, no clock, no torch.

    node              one machine of a run: facts in, actions out; combines the parts below
    shard             the value that all parts use
    slot_table        which shared-memory slot is filled next
    persist_planner   which staged image is written next, and which is skipped
    schedule          how often steps are written and archived
    retention         which steps may be deleted
    candidates        what a rank can restore
    suspicion         which steps are suspect because the script failed after them
    readiness         when a rank may vote, and what it waits for until then
    vote              the step that all ranks choose
    outlook           the same decision, from reports, for what people are told
    ledger            what is committed (`commit_rule`), from reports alone

For an overview see docs/architecture.md.
"""
