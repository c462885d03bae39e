"""The world as it was recorded: `recording` on disk, `modes` for a run, `rollout` for what one rollout sees of it."""
