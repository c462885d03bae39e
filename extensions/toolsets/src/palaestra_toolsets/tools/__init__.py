"""The sets of tools."""
