"""Unpacks images (tar files and OCI layouts) into directories on which slots base their roots."""
