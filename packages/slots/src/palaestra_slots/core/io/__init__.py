"""Files, locks, threads, processes and the HTTP listener that all layers share."""
