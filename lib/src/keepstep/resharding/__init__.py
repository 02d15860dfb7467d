"""Restoring a step into another world or layout than the one that saved it.

Saved tensors are boxes of global tensors, and so are the live ones. `boxes` intersects them, `plan`
decides which bytes come from which image, `blocks` cuts them at the borders of chunks, `sources`
reads images (mapped, or through a window), `transfer` moves the bytes, `loader` knows what modules
and optimizers want. No rank ever holds more of a model than its own part and one window.
"""
