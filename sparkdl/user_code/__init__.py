"""Code that we have not written: what it refers to, what a worker lacks of it, where it fails."""
