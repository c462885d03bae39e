"""The process that talks to a tracking service: `python -m palaestra.rollouts.observe.trackers.worker SERVICE`.

It reads JSON lines from standard input (first the run's label, then metrics and rollouts) and finishes the run at the
end of input. It uses only the standard library and the service's own client.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from typing import Any, Protocol


class Client(Protocol):
    """The client of one service in the worker process."""

    def log(self, step: int, numbers: Mapping[str, float | str]) -> None: ...

    def show(self, step: int, name: str, rows: list[tuple[str, float]]) -> None: ...

    def finish(self) -> None: ...


SERVICES = {
    "trackio": "palaestra.rollouts.observe.trackers.trackio:TrackioClient",
    "wandb": "palaestra.rollouts.observe.trackers.wandb:WandbClient",
}
"""To add a service, write a module with a `Client` and add a line here. The key must be the name of
both the service's library and Palaestra's extra."""


def main() -> None:
    """Send one run's data to the service."""
    module, _, name = SERVICES[sys.argv[1]].partition(":")
    lines = iter(sys.stdin.buffer.readline, b"")
    label: dict[str, Any] = json.loads(next(lines))
    client: Client = getattr(importlib.import_module(module), name)(label)
    for line in lines:
        entry = json.loads(line)
        if "table" in entry:
            client.show(entry["step"], entry["table"], [(text, score) for text, score in entry["rows"]])
        else:
            client.log(entry["step"], entry["numbers"])
    client.finish()


if __name__ == "__main__":
    main()
