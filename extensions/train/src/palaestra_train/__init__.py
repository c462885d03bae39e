"""Trainers that learn from rollouts, and the protocols that deliver rollouts to trainers."""
