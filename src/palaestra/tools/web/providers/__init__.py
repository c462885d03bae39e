"""Providers of searches and pages, one file each. `choosing` says which of them a configuration means."""
