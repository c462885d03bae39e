"""Slots that outlive their client."""
