"""What a training script's state is, taken apart without copying a byte.

    take       components in, `Taken` out: tensors with names, values, the tree they form
    walk       the walk itself; leaves   its result
    wrappers   DDP, FSDP, compiled modules; memory   tensors that have bytes of their own
    sharding   boxes of DTensors; topology   who else has each tensor, and stages which part
    rng        random generators; dtypes   torch's and the format's

The picture: docs/architecture.md.
"""
