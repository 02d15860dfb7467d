"""The way back.

    collective   all ranks agree on a step, and go through the stages of `restore` together
    restore      one rank's stages: open, plan, copy, finish
    in_place     from this rank's own image, in a slot, into the live objects
    load         from the images of all ranks, into any world and layout:
                 `images` are read whole or in chunks, `boxes` intersected, `plan` says which bytes
                 come from which image, `blocks` cuts them at chunks, `transfer` moves them,
                 `targets` and `optimizers` know what modules and optimizers want
    pairing      an optimizer's parameters then and now

The picture: docs/architecture.md.
"""
