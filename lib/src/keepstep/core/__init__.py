"""What decides, and nothing else: no I/O, no clock, no torch.

    node              one machine of a run: facts in, actions out; the parts below, together
    shard             the value that all of them speak of
    slot_table        which shared-memory slot is filled next
    persist_planner   which staged image is written next, and which is left out
    schedule          how often is written and archived
    retention         which steps may be deleted
    candidates        what a rank can restore
    suspicion         what is held against a step after which the script failed
    readiness         when a rank may vote, and what it waits for until then
    vote              the step that all ranks choose
    ledger            what is committed (`commit_rule`), from reports alone

The picture: docs/architecture.md.
"""
