"""Spans of a run for OpenTelemetry."""
