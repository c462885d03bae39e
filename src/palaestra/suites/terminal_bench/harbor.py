"""Reads a Harbor task directory, schema versions 1.0 to 1.4.

    task.toml  instruction.md  environment/Dockerfile  solution/solve.sh  tests/test.sh

Format: the `TaskConfig` model and the path rules of Harbor 0.25, with the older spellings that published tasks still
have (`version`, `memory = "2G"`, `allow_internet`). Keys that are not known are ignored, as Harbor does.

Not supported, and refused by name: several containers, GPUs, Windows, tool servers, health checks (a slot has no entry
point that they could wait for), and a verifier with an environment of its own. Steps: `harbor_steps.py`.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

from palaestra.core.errors import TaskError
from palaestra.core.types import AllowList, Limits, Network
from palaestra.suites.images.image_spec import ImageRecipe, Unsupported
from palaestra.suites.terminal_bench.compose import single_service
from palaestra.suites.terminal_bench.harbor_steps import read_steps, read_strategy
from palaestra.suites.terminal_bench.terminal_task import Format, Solution, TerminalTask, Verifier
from palaestra.suites.terminal_bench.typed_sections import Section

CONFIG_NAME = "task.toml"
_VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")


def is_task(folder: Path) -> bool:
    """Whether the folder is meant as a Harbor task."""
    return (folder / CONFIG_NAME).is_file()


def read_task(folder: Path) -> TerminalTask:
    """The task of a folder. Raises `TaskError` (`Unsupported` for what slots cannot do) with one clear message."""
    config = _config(folder / CONFIG_NAME)
    _check_version(config)
    _check_supported(config)
    steps = read_steps(config, folder, _instruction, _verifier, _solution)
    if steps and any(step.solution is None for step in steps):
        steps = tuple(replace(step, solution=None) for step in steps)
    first = steps[0] if steps else None
    metadata, environment, agent = config.section("metadata"), config.section("environment"), config.section("agent")
    return TerminalTask(
        name=folder.name,
        format=Format.HARBOR,
        path=folder,
        instruction=first.instruction if first else _instruction(folder / "instruction.md"),
        recipe=_recipe(folder / "environment", environment),
        verifier=first.verifier if first else _verifier(folder / "tests", config.section("verifier")),
        solution=first.solution if first else _solution(folder / "solution", config.section("solution")),
        category=metadata.text("category") or "uncategorized",
        difficulty=metadata.text("difficulty") or "unknown",
        tags=metadata.texts("tags"),
        env=environment.variables("env"),
        workdir=environment.text("workdir"),
        agent_user=agent.user("user"),
        agent_timeout_s=agent.number("timeout_sec"),
        network=_network(agent, environment),
        limits=_limits(environment),
        live=metadata.text("grading") == "live",
        steps=steps,
        reward_strategy=read_strategy(config),
    )


def _config(path: Path) -> Section:
    try:
        return Section(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TaskError(f"{path.name} is not TOML: {error}") from None
    except OSError as error:
        raise TaskError(f"{path.name} cannot be read: {error.strerror}") from None


def _check_version(config: Section) -> None:
    version = config.values.get("schema_version", config.values.get("version", _VERSIONS[-1]))
    if str(version) not in _VERSIONS:
        raise Unsupported(
            f"schema_version {version} is not known; this version reads {_VERSIONS[0]} to {_VERSIONS[-1]}"
        )


def _check_supported(config: Section) -> None:
    environment, verifier = config.section("environment"), config.section("verifier")
    lacking = {
        f"it needs the system {environment.text('os')!r}": (environment.text("os") or "linux").lower() != "linux",
        "it needs GPUs": bool(environment.values.get("gpus")),
        "it needs a TPU": bool(environment.values.get("tpu")),
        "it needs tool servers (environment.mcp_servers)": bool(environment.sections("mcp_servers")),
        "it waits for a service that its image starts (environment.healthcheck), and slots start none": bool(
            environment.section("healthcheck").values
        ),
        "its verifier has an environment of its own (verifier.environment_mode)": (
            verifier.text("environment_mode") == "separate"
        ),
    }
    for reason, holds in lacking.items():
        if holds:
            raise Unsupported(reason)


def _instruction(path: Path) -> str:
    text = _read_text(path)
    if not text.strip():
        raise TaskError("instruction.md is empty")
    return text


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TaskError(f"{path.name} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path.name} cannot be read: {error}") from None


def _recipe(folder: Path, environment: Section) -> ImageRecipe:
    single_service(folder / "docker-compose.yaml")
    if (folder / "singularity-compose.yaml").is_file() and not (folder / "Dockerfile").is_file():
        raise Unsupported("it needs singularity-compose, which slots do not have")
    dockerfile = folder / "Dockerfile"
    image = environment.text("docker_image")
    if not dockerfile.is_file() and image is None:
        raise TaskError("environment/Dockerfile is missing, and environment.docker_image names no image")
    return ImageRecipe(
        folder=folder,
        dockerfile=dockerfile if dockerfile.is_file() else None,
        docker_image=image,
        build_timeout_s=environment.number("build_timeout_sec") or 600.0,
    )


def _verifier(folder: Path, verifier: Section, shared: Path | None = None) -> Verifier:
    if not any(each is not None and (each / "test.sh").is_file() for each in (folder, shared)):
        if (folder / "test.bat").is_file():
            raise Unsupported("tests/test.bat needs Windows")
        raise TaskError("tests/test.sh is missing")
    return Verifier(
        folder=folder,
        script="test.sh",
        timeout_s=verifier.number("timeout_sec") or 600.0,
        env=verifier.variables("env"),
        user=verifier.user("user"),
        shared=shared,
    )


def _solution(folder: Path, solution: Section) -> Solution | None:
    if not (folder / "solve.sh").is_file():
        return None
    return Solution(
        folder,
        "solve.sh",
        {"DEBIAN_FRONTEND": "noninteractive", **solution.variables("env")},
        tuple(str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()),
    )


def _network(agent: Section, environment: Section) -> Network | AllowList:
    """What the agent may reach: the agent's own mode before the environment's, before the older `allow_internet`."""
    for section in (agent, environment):
        mode = section.text("network_mode")
        if mode is not None:
            return _mode(mode.lower().replace("-", "_"), section)
    return Network.OFF if environment.flag("allow_internet") is False else Network.ON


def _mode(mode: str, section: Section) -> Network | AllowList:
    if mode == "public":
        return Network.ON
    if mode == "no_network":
        return Network.OFF
    hosts = section.texts("allowed_hosts")
    if mode != "allowlist":
        raise TaskError(f"{section.key('network_mode')} must be public, no_network or allowlist, not {mode!r}")
    return AllowList(hosts) if hosts else Network.OFF


def _limits(environment: Section) -> Limits:
    default = Limits()
    try:
        return Limits(
            memory_bytes=environment.size_bytes("memory", "memory_mb") or default.memory_bytes,
            cpus=environment.number("cpus") or None,
            disk_bytes=environment.size_bytes("storage", "storage_mb") or default.disk_bytes,
        )
    except ValueError as error:
        raise TaskError(f"task.toml: {error}") from None
