"""What the driver learns of its workers: output, stacks, why they were lost."""
