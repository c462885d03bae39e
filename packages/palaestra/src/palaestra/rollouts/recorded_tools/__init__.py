"""Recorded replies of tools that reach outside this machine: the file, the calls of one rollout, and a run's policy."""
