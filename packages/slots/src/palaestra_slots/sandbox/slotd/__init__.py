"""The slot server: the standard library only, one file for each concern of the kernel."""
