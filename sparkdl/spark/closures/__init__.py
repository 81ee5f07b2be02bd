"""What the user's functions refer to besides modules: broadcast variables and accumulators."""
