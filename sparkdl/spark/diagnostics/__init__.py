"""What the driver learns about its workers: output, stacks, why they were lost."""
