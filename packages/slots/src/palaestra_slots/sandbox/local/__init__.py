"""The client of the slot server."""
