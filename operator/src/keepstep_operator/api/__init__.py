"""The objects that the operator reads and writes in the API: policies, pods, runs.

policy, tiers                CheckpointPolicy, and its parts for peers and archive
pod, job_kinds               a training pod; how each kind of job tells its pods apart
run_status, cluster_objects  CheckpointRun and Checkpoint
fields, quantities           how fields are read; sizes and times
"""
