"""The one way in which anything is published: whole, durably, and only where it was meant to go."""
