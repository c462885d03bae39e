"""What a gateway does: its platforms, queues and errors, for a person and for Prometheus."""
