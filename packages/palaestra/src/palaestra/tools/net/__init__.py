"""Requests of tools to addresses that a model chooses."""
