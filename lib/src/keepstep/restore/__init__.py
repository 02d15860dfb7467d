"""The restore of a step.

    collective   all ranks agree on a step, and go through the stages of `restore` together
    restore      the stages of one rank: open, plan, copy, finish
    load         what the live objects need of a step, for any world size and layout.
                 `images` are read whole or in chunks (only this rank's own, where it fits),
                 `boxes` are intersected, `plan` says which bytes come from which image,
                 `transfer` moves them, `targets` finds the saved tensor for each live one,
                 `modules` and `optimizers` know what these need. `keepstep.dcp` reads through the
                 same modules.

The picture: docs/architecture.md.
"""
