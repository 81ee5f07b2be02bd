"""The Spark session: creating it, preparing quick starts, and what it encrypts."""
