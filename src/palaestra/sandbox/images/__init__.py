"""Turns images (tar files and OCI layouts) into directories that slots have below their root."""
