"""The restore of a step.

    collective   all ranks agree on a step, and go through the stages of `restore` together
    restore      the stages of one rank: open, plan, copy, finish
    load         what the live objects need of a step, for any world size and layout.
                 `images` are read whole or in chunks (only this rank's own, where it fits),
                 `boxes` are intersected, `plan` says which bytes come from which image, `blocks`
                 cuts them at chunks, `transfer` moves them, `targets` and `optimizers` know what
                 modules and optimizers need. `keepstep.dcp` reads through the same modules.
    pairing      matches an optimizer's saved parameters with the live ones

The picture: docs/architecture.md.
"""
