"""What subscribes to the events of a run, and what is read from finished runs."""
