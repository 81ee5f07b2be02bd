"""The driver's end: a service whose loop turns bytes into events and decisions into bytes."""
