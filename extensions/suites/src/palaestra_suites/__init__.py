"""The environments that come with Palaestra, the grading of code, and the images that tasks need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from palaestra_slots.core.lazy_names import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
