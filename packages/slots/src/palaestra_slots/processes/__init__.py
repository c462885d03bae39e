"""Keeps the background processes of each task as sessions with ids. The output of a session is read from a cursor,
which is an offset in bytes. To read the code, start with `registry.py`."""
