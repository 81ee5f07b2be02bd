"""What a configuration may say, what of it is refused, and the objects that it names."""
