"""What the cluster has: slots, the queue for them, GPUs, interfaces, jobs."""
