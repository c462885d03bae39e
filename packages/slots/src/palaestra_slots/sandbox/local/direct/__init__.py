"""The fast path to a slot: commands and files without the slot server."""
