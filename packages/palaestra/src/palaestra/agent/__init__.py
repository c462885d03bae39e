"""The agent loop and its results."""
