"""Looks at a model server or a model's folder, and says what works, what does not, and the way out."""

from palaestra.inference.doctor.checks import Check, Diagnosis, State
from palaestra.inference.doctor.examine import Target, diagnose

__all__ = ["Check", "Diagnosis", "State", "Target", "diagnose"]
