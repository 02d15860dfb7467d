"""Takes apart the state of a training script, without copying a byte.

    capture      components in, `TakenState` out: tensors with names, values, the tree they form
    walk         the walk itself; leaves   its result
    wrappers     DDP, FSDP, compiled modules; accelerator   where the bytes of tensors are
    sharding     boxes of DTensors; topology   which ranks have each tensor and stage which part
    rng          random generators; dtypes   names of dtypes in torch and in the format

The picture: docs/architecture.md.
"""
