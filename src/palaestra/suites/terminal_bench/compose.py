"""Looks at a task's compose file: one container is a slot, more are refused."""

from __future__ import annotations

from pathlib import Path

from palaestra.core.errors import TaskError
from palaestra.core.literals import read_yaml
from palaestra.core.types import JSON
from palaestra.suites.images.image_spec import Unsupported


def single_service(path: Path) -> dict[str, JSON]:
    """The one service of a compose file, without what only names or mounts things; empty where there is no file.

    Raises `Unsupported` for several services, `TaskError` for what is no compose file.
    """
    if not path.is_file():
        return {}
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskError(f"{path.name} is not YAML: {error}") from None
    services = content.get("services") if isinstance(content, dict) else None
    if not isinstance(services, dict) or not services:
        raise TaskError(f"{path.name} names no services")
    if len(services) > 1:
        raise Unsupported(f"it needs {len(services)} containers ({', '.join(map(str, services))}), and a slot is one")
    service = next(iter(services.values()))
    if not isinstance(service, dict):
        raise TaskError(f"{path.name}: its service must be a mapping")
    for key in ("privileged", "devices", "gpus"):
        if service.get(key):
            raise Unsupported(f"it needs {key} of the container, which slots do not have")
    return service
