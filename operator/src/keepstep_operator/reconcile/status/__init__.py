"""What people read on a CheckpointRun and a CheckpointPolicy. Pure."""
