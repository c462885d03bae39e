"""The environments of the documentation."""
