"""Trainings that agents start: `palaestra train` as a process of its own, and its folder."""
