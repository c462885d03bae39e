"""Experiment trackers that receive the metrics of a run."""
