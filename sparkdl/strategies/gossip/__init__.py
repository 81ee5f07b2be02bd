"""Gossip: replicas mix with a few others at a time, without a center."""
