"""Read a task's compose file. A slot is one container, so a file with several services is rejected."""

from __future__ import annotations

from pathlib import Path

from palaestra.core.errors import TaskError
from palaestra.core.types import JSON
from palaestra.suites.task_files import Unsupported, read_yaml_file


def single_service(path: Path) -> dict[str, JSON]:
    """Return the only service of a compose file, or an empty mapping if the file does not exist.

    Raises `Unsupported` if there are several services, or if the service needs privileges, devices or GPUs. Raises
    `TaskError` if the file is not a compose file.
    """
    if not path.is_file():
        return {}
    content = read_yaml_file(path)
    services = content.get("services") if isinstance(content, dict) else None
    if not isinstance(services, dict) or not services:
        raise TaskError(f"{path.name} names no services")
    if len(services) > 1:
        raise Unsupported(
            f"it needs {len(services)} containers ({', '.join(map(str, services))}), but a slot is one container"
        )
    service = next(iter(services.values()))
    if not isinstance(service, dict):
        raise TaskError(f"{path.name}: its service must be a mapping")
    for key in ("privileged", "devices", "gpus"):
        if service.get(key):
            raise Unsupported(f"its service sets {key}, which slots do not support")
    return service
