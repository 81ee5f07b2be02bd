"""The Spark session: made, prepared for quick starts, and asked what it encrypts."""
