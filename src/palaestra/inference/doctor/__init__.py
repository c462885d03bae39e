"""Checks a model server or a model's folder, and reports what works, what does not, and the fix."""

from palaestra.inference.doctor.checks import CheckState, Diagnosis, DoctorCheck
from palaestra.inference.doctor.examine import Target, diagnose

__all__ = ["CheckState", "Diagnosis", "DoctorCheck", "Target", "diagnose"]
