"""File systems beyond the local one: Hadoop's, and those that only the driver can open."""
