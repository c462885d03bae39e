"""Hands out ports that nobody listens on."""

from __future__ import annotations

import socket

import pytest


@pytest.fixture
def unused_tcp_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
