"""What the operator reads and writes in the API: policies, pods, runs; parsed once."""
