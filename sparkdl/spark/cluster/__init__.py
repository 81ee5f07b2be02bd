"""What the cluster has: slots, whose turn they are, GPUs, interfaces, jobs."""
