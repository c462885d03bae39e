"""The families of generated tasks, one module for each kind of work."""
