"""The environments that come with Palaestra, the grading of code, and the images that tasks need."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palaestra_suites.examples.count_lines import count_lines
    from palaestra_suites.swe.authoring.build_tasks import BuildOptions as SweBuildOptions
    from palaestra_suites.swe.authoring.build_tasks import build as build_swe_tasks
    from palaestra_suites.swe.swe_smith_oracle import SweSmithOracleEnvConfig
    from palaestra_suites.terminal_bench.sandboxes.task_sandbox import TaskSandbox, TaskSandboxSpec
    from palaestra_suites.terminal_bench.sandboxes.task_sandboxes import TaskSandboxes, TaskSandboxSettings

_MODULES = {
    "SweBuildOptions": "swe.authoring.build_tasks:BuildOptions",
    "SweSmithOracleEnvConfig": "swe.swe_smith_oracle",
    "TaskSandbox": "terminal_bench.sandboxes.task_sandbox",
    "TaskSandboxSettings": "terminal_bench.sandboxes.task_sandboxes",
    "TaskSandboxSpec": "terminal_bench.sandboxes.task_sandbox",
    "TaskSandboxes": "terminal_bench.sandboxes.task_sandboxes",
    "build_swe_tasks": "swe.authoring.build_tasks:build",
    "count_lines": "examples.count_lines",
}

__all__ = [
    "SweBuildOptions",
    "SweSmithOracleEnvConfig",
    "TaskSandbox",
    "TaskSandboxSettings",
    "TaskSandboxSpec",
    "TaskSandboxes",
    "build_swe_tasks",
    "count_lines",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'palaestra_suites' has no attribute {name!r}")
    module, _, attribute = _MODULES[name].partition(":")
    value: object = getattr(
        import_module(module if module.startswith("palaestra") else f"palaestra_suites.{module}"), attribute or name
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
