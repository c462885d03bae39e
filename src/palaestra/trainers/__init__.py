"""Who learns from rollouts: one folder per way of handing them over."""
