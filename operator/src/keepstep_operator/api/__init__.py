"""What the operator reads and writes in the API: policies, pods, runs; parsed once.

policy, tiers           CheckpointPolicy, and what it says of peers and archive
pod, job_kinds          a training pod; how each kind of job tells its ranks
run, model              CheckpointRun and Checkpoint
fields, quantities      how a field is read; sizes and times
"""
