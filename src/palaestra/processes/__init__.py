"""Background processes as sessions: by id, per task, with their output by cursor. `registry.py` is the way in."""
