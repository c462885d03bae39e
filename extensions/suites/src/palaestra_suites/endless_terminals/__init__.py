"""Terminal tasks that are generated without a model, and those of Endless Terminals."""
