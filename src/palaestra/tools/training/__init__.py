"""Training runs that agents start: each is a `palaestra train` process with its own folder."""
