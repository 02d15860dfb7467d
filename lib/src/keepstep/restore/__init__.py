"""The way back.

    collective   all ranks agree on a step, and go through the stages of `restore` together
    restore      one rank's stages: open, plan, copy, finish
    load         what the live objects want of a step, into any world and layout:
                 `images` are read whole or in chunks (this rank's own alone, where it fits),
                 `boxes` intersected, `plan` says which bytes come from which image, `blocks` cuts
                 them at chunks, `transfer` moves them, `targets` and `optimizers` know what modules
                 and optimizers want; `keepstep.dcp` reads by the same
    pairing      an optimizer's parameters then and now

The picture: docs/architecture.md.
"""
