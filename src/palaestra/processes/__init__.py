"""Background processes as sessions with ids, kept per task, with output read by cursor. Start at `registry.py`."""
