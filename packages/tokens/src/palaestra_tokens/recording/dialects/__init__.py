"""One file for each API that the recording endpoint answers."""
