"""Plays a task in a sandbox with an agent, grades the work, and records all of it."""
