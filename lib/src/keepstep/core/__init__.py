"""What decides, and nothing else: no I/O, no clock, no torch.

    slot_table        which shared-memory slot is filled next
    persist_planner   which staged image is written next, and which is left out
    schedule          how often is written and archived
    retention         which steps may be deleted
    candidates, vote  what a rank can restore, and the step that all ranks choose
    ledger            what is committed, from reports alone

The picture: docs/architecture.md.
"""
