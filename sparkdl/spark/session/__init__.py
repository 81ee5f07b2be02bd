"""The Spark session: creating it, and what it encrypts."""
