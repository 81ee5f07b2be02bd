"""What the cluster has: slots and the queue for them, GPUs, network interfaces, jobs."""
