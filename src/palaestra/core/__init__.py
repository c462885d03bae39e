"""Types, errors, configuration and helpers that every layer shares. I/O happens only in `core.io`."""
