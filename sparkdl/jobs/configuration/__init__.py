"""What a configuration may say, what is refused, and the objects that it names."""
