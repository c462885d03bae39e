"""Keeps the background processes of each task as sessions with ids, whose output is read by cursor. Start at
`registry.py`."""
