"""Brings models onto this machine: `palaestra model get` and `palaestra model from-gguf`."""
