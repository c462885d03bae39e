"""Types, errors, configuration and helpers that every layer shares. `core.io` handles files, processes, threads and
HTTP servers."""
