"""Verifiable bug-fixing tasks from real packages: download, make a repository, inject bugs, keep what tests notice."""
