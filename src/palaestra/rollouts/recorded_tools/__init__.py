"""Recorded replies of tools that touch the world: the file, the calls of one rollout, and the policy of a run."""
