"""The restore of a step.

    collective   all ranks agree on a step, and go through the stages of `restore` together
    restore      the stages of one rank: open, plan, copy, finish
    loader       what the live objects need of a step, for any world size and layout.
                 `images` are mapped, or read in chunks, or lent by other ranks, and their bytes
                 moved as `fill_plan` says; `targets` finds the saved tensor for each live one,
                 `modules` and `optimizers` know what these need. `keepstep.dcp` reads through the
                 same modules.
    rehearsal    whether what is kept could be restored, before the first step

The picture: docs/architecture.md.
"""
