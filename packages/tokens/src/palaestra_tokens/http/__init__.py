"""Requests to model servers, their retries, chat completions and streams."""
