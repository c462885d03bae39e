"""Prepared workspaces, kept between runs."""
