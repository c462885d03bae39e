"""Sandboxes for calls without a run, and the servers and tools of existing classes."""
