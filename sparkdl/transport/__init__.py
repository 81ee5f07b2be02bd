"""Connections between workers and driver: dialing, proof, encryption, framing and deadlines."""
