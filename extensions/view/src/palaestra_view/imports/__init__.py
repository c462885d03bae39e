"""Files of other programs as rollouts."""
