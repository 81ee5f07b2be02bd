"""Elastic averaging: replicas on springs, in all its modes."""
