"""The values that replicas average: how they travel, are summed and move the center."""
