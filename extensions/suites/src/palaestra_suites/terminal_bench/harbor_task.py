"""Read a Harbor task directory, schema versions 0.1 and 1.0 to 1.4.

    task.toml  instruction.md  environment/Dockerfile  solution/solve.sh  tests/test.sh

A task with several steps has `[[steps]]` in task.toml and a folder for each step:

    steps/NAME/instruction.md  tests/test.sh  solution/solve.sh  workdir/  workdir/setup.sh

A step's tests are copied over the task's tests. A step without its own `test.sh` or solution uses the task's.

Format: `TaskConfig`, `StepConfig`, `MultiStepTrial` and the path rules of Harbor 0.25, with the older spellings of
published tasks (`version`, `memory = "2G"`, `allow_internet`).

`_KEYS` lists every key of the format. A key that could change a score and that slots do not honour rejects the task.
A key that the format does not have is ignored, as by Harbor, and so is the number of an unknown version; both are named
in `TerminalTask.ignored`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import JSON, AllowList, Limits, Network
from palaestra_slots.images.dockerfile import ImageRecipe
from palaestra_slots.images.task_files import TypedFields, Unsupported, read_task_text, read_toml_file
from palaestra_suites.terminal_bench.compose import COMPOSE_NAME, read_services, single_service
from palaestra_suites.terminal_bench.service import MAIN, HealthCheck, Service
from palaestra_suites.terminal_bench.terminal_task import (
    ARTIFACT_LOGS,
    FINAL,
    MEAN,
    Artifact,
    CollectHook,
    Format,
    SolutionScript,
    TaskAgent,
    TaskMetadata,
    TaskServer,
    TaskStep,
    TerminalTask,
    Verifier,
    VerifierEnvironment,
)

CONFIG_NAME = "task.toml"
_STEP_NAME = re.compile(r"[^\x00-\x1f/\\<>:\"|?*]+")
_VERSIONS = ("0.1", "1.0", "1.1", "1.2", "1.3", "1.4")

_HONOURED, _NO_EFFECT = "honoured", "no effect on a score"
_ONE_SLOT = "its steps differ, but a rollout has one slot"

_KEYS: Mapping[str, Mapping[str, str]] = {
    "": {
        **dict.fromkeys(("schema_version", "version", "metadata", "agent", "verifier", "environment"), _HONOURED),
        **dict.fromkeys(("solution", "steps", "multi_step_reward_strategy", "artifacts"), _HONOURED),
        **dict.fromkeys(("task", "source", "sources"), _NO_EFFECT),
    },
    "environment": {
        **dict.fromkeys(("build_timeout_sec", "docker_image", "os", "cpus", "env", "workdir"), _HONOURED),
        **dict.fromkeys(("memory", "memory_mb", "storage", "storage_mb"), _HONOURED),
        **dict.fromkeys(("network_mode", "allowed_hosts", "allow_internet"), _HONOURED),
        "gpus": "it needs GPUs",
        "gpu_types": _NO_EFFECT,  # which GPUs, if `gpus` asks for any
        "tpu": "it needs a TPU",
        **dict.fromkeys(("mcp_servers", "healthcheck", "skills_dir"), _HONOURED),
    },
    "environment.healthcheck": {
        **dict.fromkeys(("command", "interval_sec", "timeout_sec", "start_period_sec", "retries"), _HONOURED),
        "start_interval_sec": _NO_EFFECT,  # the command is tried more often than that
    },
    "environment.mcp_servers": dict.fromkeys(("name", "transport", "url", "command", "args", "headers"), _HONOURED),
    "agent": dict.fromkeys(("timeout_sec", "user", "network_mode", "allowed_hosts"), _HONOURED),
    "verifier": {
        **dict.fromkeys(("timeout_sec", "env", "user"), _HONOURED),
        # Verifiers have no network; a script whose download fails gives no score.
        **dict.fromkeys(("network_mode", "allowed_hosts"), _NO_EFFECT),
        **dict.fromkeys(("environment_mode", "environment", "collect"), _HONOURED),
    },
    "verifier.collect": dict.fromkeys(("command", "service", "timeout_sec", "user"), _HONOURED),
    "artifacts": {
        **dict.fromkeys(("source", "exclude", "service"), _HONOURED),
        "destination": _NO_EFFECT,  # where people find the copy; a verifier always gets it at `source`
    },
    "solution": {"env": _HONOURED},
    "steps": {
        **dict.fromkeys(("name", "agent", "verifier", "min_reward", "artifacts", "healthcheck"), _HONOURED),
    },
    "steps.agent": {
        "timeout_sec": _HONOURED,
        **dict.fromkeys(("user", "network_mode", "allowed_hosts"), _ONE_SLOT),
    },
}
"""What happens to each key of each table: it is honoured, it cannot change a score, or the reason for the rejection.
Source: `TaskConfig` of Harbor 0.25 and the order of its `SingleStepTrial`. `metadata` and `task` hold anything."""


def is_task(folder: Path) -> bool:
    """Return whether the folder is a Harbor task."""
    return (folder / CONFIG_NAME).is_file()


def read_task(folder: Path, variables: Mapping[str, str] | None = None) -> TerminalTask:
    """Return the task of a folder. `variables` are the values of the host's variables to which its tables may refer.
    Raises `TaskError`, and `Unsupported` for a task that slots cannot run."""
    config = TypedFields(read_toml_file(folder / CONFIG_NAME), known=variables)
    ignored = (*_unknown_version(config), *_check_supported(config))
    steps = _steps(config, folder)
    if steps and any(step.solution is None for step in steps):
        steps = tuple(replace(step, solution=None) for step in steps)
    first = steps[0] if steps else None
    metadata, environment, agent = config.section("metadata"), config.section("environment"), config.section("agent")
    services = _services(folder / "environment", environment)
    main = services.get(MAIN)
    verifiers = [step.verifier for step in steps] or [
        _verifier(folder / "tests", config.section("verifier"), folder, config)
    ]
    _check_services(verifiers, services)
    if main is not None and main.user:  # the user of every command in `main` that names no other
        verifiers = [_run_as(each, main.user) for each in verifiers]
        steps = tuple(replace(step, verifier=each) for step, each in zip(steps, verifiers, strict=False))
    return TerminalTask(
        name=folder.name,
        format=Format.HARBOR,
        path=folder,
        instruction=first.instruction if first else _instruction(folder / "instruction.md"),
        recipe=_recipe(folder / "environment", environment) if main is None else main.recipe,
        verifier=verifiers[0],
        solution=first.solution if first else _solution_script(folder / "solution", config.section("solution")),
        metadata=TaskMetadata(
            metadata.text("category") or "uncategorized",
            metadata.text("difficulty") or "unknown",
            metadata.texts("tags"),
        ),
        agent=TaskAgent(
            agent.user("user") or (main.user if main else None),
            agent.number("timeout_sec"),
            _network(agent, environment),
            _servers(environment),
            _skills_dir(environment),
        ),
        env={**(main.env if main else {}), **environment.variables("env")},
        workdir=environment.text("workdir") or (main.workdir if main else None),
        limits=main.limits if main else _limits(environment),
        services=tuple(services.values()),
        live=metadata.text("grading") == "live",
        steps=steps,
        reward_strategy=_strategy(config),
        ignored=ignored,
    )


def read_cheat(task: TerminalTask, variables: Mapping[str, str] | None = None) -> SolutionScript | None:
    """Return the script of `cheat/solve.sh`, with which the author of a task shows an attack that must not be paid.
    Submissions to Terminal-Bench 3 have one. Raises `TaskError`."""
    if task.format is not Format.HARBOR or not (task.path / "cheat").is_dir():
        return None
    config = TypedFields(read_toml_file(task.path / CONFIG_NAME), known=variables)
    return _solution_script(task.path / "cheat", config.section("solution"))


def _unknown_version(config: TypedFields) -> list[str]:
    """Return the version if the format does not have it. Harbor reads no version's files in another way."""
    name = "schema_version" if "schema_version" in config.values else "version"
    version = str(config.values.get(name, _VERSIONS[-1]))
    return [] if version in _VERSIONS else [f"{name} = {version:.40}"]


def _check_supported(config: TypedFields) -> tuple[str, ...]:
    """Return the keys that the format does not have. Raises `Unsupported` for the first key that slots do not
    honour."""
    environment = config.section("environment")
    found = _check_keys(config, "")
    for name in ("environment", "agent", "solution"):
        found += _check_keys(config.section(name), name)
    found += _check_keys(environment.section("healthcheck"), "environment.healthcheck")
    for server in environment.sections("mcp_servers"):
        found += _check_keys(server, "environment.mcp_servers")
    found += _check_verifier(config.section("verifier"))
    for step in config.sections("steps"):
        found += _check_keys(step, "steps")
        found += _check_keys(step.section("healthcheck"), "environment.healthcheck")
        found += _check_keys(step.section("agent"), "steps.agent")
        found += _check_verifier(step.section("verifier"))
    for section in (config, *config.sections("steps")):
        for value in section.values.get("artifacts") or ():
            if isinstance(value, Mapping):
                found += _check_keys(TypedFields(value, section.key("artifacts")), "artifacts")
    if (environment.text("os") or "linux").lower() != "linux":
        raise Unsupported(f"it needs the system {environment.text('os')!r} ({environment.key('os')})")
    return tuple(dict.fromkeys(found))


def _check_verifier(verifier: TypedFields) -> list[str]:
    found = _check_keys(verifier, "verifier")
    found += _check_keys(verifier.section("environment"), "environment")
    for key in ("mcp_servers", "skills_dir"):
        if verifier.section("environment").values.get(key):
            raise Unsupported(f"{verifier.section('environment').key(key)}: only the agent has tool servers and skills")
    if verifier.section("environment").section("healthcheck").values:
        raise Unsupported(f"{verifier.section('environment').key('healthcheck')}: verifiers wait for nothing")
    for hook in verifier.sections("collect"):
        found += _check_keys(hook, "verifier.collect")
    return found


def _check_keys(section: TypedFields, table: str) -> list[str]:
    """Return the keys of a table that the format does not have."""
    ignored = []
    for name, value in section.values.items():
        use = _KEYS[table].get(name)
        if use in (_HONOURED, _NO_EFFECT) or _asks_for_nothing(value):
            continue
        if use is not None:
            raise Unsupported(f"{use} ({section.key(name)}). Remove the key if the task's score does not depend on it")
        close = difflib.get_close_matches(str(name), _KEYS[table], 1, cutoff=0.76)
        meant = f" (did you mean {section.key(close[0])}?)" if close else ""
        ignored.append(f"{section.key(str(name)):.200}{meant}")
    return ignored


def _asks_for_nothing(value: JSON) -> bool:
    """Return whether a value is the default of its key."""
    return value is None or value is False or value in (0, "", [])


def _instruction(path: Path) -> str:
    text = read_task_text(path)
    if not text.strip():
        raise TaskError("instruction.md is empty")
    return text


def _services(folder: Path, environment: TypedFields) -> dict[str, Service]:
    """Return the services of the compose file. Its variables are those of `[environment.env]`, and the limits that
    Harbor sets."""
    known = {"CPUS": environment.values.get("cpus"), "MEMORY": environment.values.get("memory_mb")}
    limits = {name: f"{value}{'m' if name == 'MEMORY' else ''}" for name, value in known.items() if value is not None}
    has_own = (folder / "Dockerfile").is_file() or environment.text("docker_image") is not None
    own = _recipe(folder, environment) if has_own else None
    services = read_services(folder, {**environment.variables("env"), **limits}, own, _limits(environment))
    check = environment.section("healthcheck")
    if not check.values:
        return services
    main = services.get(MAIN) or Service(MAIN, _recipe(folder, environment), names=(MAIN,), limits=_limits(environment))
    if main.health is not None:
        raise Unsupported(f"{check.key('command')} and {COMPOSE_NAME} both have a health check of {MAIN}; keep one")
    return {**services, MAIN: replace(main, health=_health_check(check))}


def _health_check(check: TypedFields) -> HealthCheck:
    return HealthCheck(
        ("bash", "-c", check.required("command")),
        interval_s=check.number("interval_sec") or 5.0,
        timeout_s=check.number("timeout_sec") or 30.0,
        retries=int(check.number("retries") or 3),
        start_s=(check.number("start_period_sec") or 0.0) if check.values.get("start_period_sec") else 0.0,
    )


def _run_as(verifier: Verifier, user: str) -> Verifier:
    hooks = tuple(replace(each, user=each.user or user) if each.service == MAIN else each for each in verifier.collect)
    shares = verifier.environment is None
    return replace(verifier, collect=hooks, user=verifier.user or user if shares else verifier.user)


def _check_services(verifiers: Sequence[Verifier], services: Mapping[str, Service]) -> None:
    """Raise `TaskError` if a verifier names a service that the task does not have."""
    for verifier in verifiers:
        artifacts = verifier.environment.artifacts if verifier.environment is not None else ()
        named = {each.service for each in verifier.collect} | {each.service for each in artifacts}
        for name in sorted(named - {MAIN, *services}):
            raise TaskError(f"a collect hook or an artifact names the service {name!r:.100}, which is missing")


def _recipe(folder: Path, environment: TypedFields, named: str | None = None) -> ImageRecipe:
    if (folder / "singularity-compose.yaml").is_file() and not (folder / "Dockerfile").is_file():
        raise Unsupported("it needs singularity-compose, which slots do not have")
    dockerfile = folder / "Dockerfile"
    image = named or environment.text("docker_image")
    if not dockerfile.is_file() and image is None:
        raise TaskError(f"{folder.name}/Dockerfile is missing, and environment.docker_image names no image")
    return ImageRecipe(
        folder=folder,
        dockerfile=dockerfile if dockerfile.is_file() else None,
        docker_image=image,
        build_timeout_s=environment.number("build_timeout_sec") or 600.0,
    )


def _verifier(
    folder: Path, verifier: TypedFields, task: Path, config: TypedFields, step: TypedFields | None = None
) -> Verifier:
    """Return the verifier of a task, or of its `step`. `verifier` has the settings of the step and of the task."""
    shared = task / "tests" if step is not None else None
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
        environment=_verifier_environment(folder, task, config, step),
        collect=_collect_hooks([config, *([] if step is None else [step])]),
    )


def _verifier_environment(
    folder: Path, task: Path, config: TypedFields, step: TypedFields | None
) -> VerifierEnvironment | None:
    """Return the environment of a separate verifier, or None for a verifier that shares the agent's.

    A step's mode counts before the task's. In each, `environment_mode` counts before the table `environment`, which
    alone means `separate`. The image is the first that a step and then the task has: the table's `docker_image`, or the
    Dockerfile next to the tests, which then has the tests too. If there is none, it is the task's own image.
    """
    levels = [(each.section("verifier"), place) for each, place in ((step, folder), (config, task / "tests")) if each]
    if next(filter(None, (_mode_of(verifier) for verifier, _ in levels)), "") != "separate":
        return None
    tables = [verifier.section("environment") for verifier, _ in levels if "environment" in verifier.values]
    settings = tables[0] if tables else config.section("environment")
    recipe, has_tests = None, True
    for verifier, place in levels:
        image = verifier.section("environment").text("docker_image")
        if image or (place / "Dockerfile").is_file() or (place / COMPOSE_NAME).is_file():
            single_service(place / COMPOSE_NAME)
            recipe = _recipe(place, settings, image)
            break
    else:
        own = _services(task / "environment", config.section("environment")).get(MAIN)
        recipe = _recipe(task / "environment", config.section("environment")) if own is None else own.recipe
        has_tests = False
    entries = [each for section in (config, step) if section is not None for each in _artifacts(section)]
    if not any((each.source, each.service) == (ARTIFACT_LOGS, MAIN) for each in entries):
        entries.insert(0, Artifact(ARTIFACT_LOGS))
    return VerifierEnvironment(
        recipe, has_tests, tuple(entries), settings.variables("env"), settings.text("workdir"), _limits(settings)
    )


def _mode_of(verifier: TypedFields) -> str:
    """Return the mode that one table asks for; empty if it asks for none."""
    mode, has_table = verifier.text("environment_mode") or "", "environment" in verifier.values
    if mode not in ("", "shared", "separate"):
        raise TaskError(f"{verifier.key('environment_mode')} must be shared or separate, not {mode!r:.200}")
    if mode == "shared" and has_table:
        raise TaskError(f'{verifier.key("environment")} needs {verifier.key("environment_mode")} = "separate"')
    return mode or ("separate" if has_table else "")


def _artifacts(section: TypedFields) -> Iterator[Artifact]:
    """Yield the declared artifacts of a task or step. Each is a path, or a table with `source`."""
    for value in section.values.get("artifacts") or ():
        entry = TypedFields({"source": value} if isinstance(value, str) else value, section.key("artifacts"))
        source = entry.text("source") or ""
        path = source.rstrip("/")
        if not path.startswith("/") or ".." in path.split("/"):
            raise TaskError(f"{entry.key('source')} must be an absolute path below / without `..`, not {source!r:.200}")
        yield Artifact(path, entry.texts("exclude"), entry.text("service") or MAIN)


def _collect_hooks(levels: Sequence[TypedFields]) -> tuple[CollectHook, ...]:
    hooks = []
    for level in levels:
        for hook in level.section("verifier").sections("collect"):
            service, timeout_s = hook.text("service") or MAIN, hook.number("timeout_sec") or 60.0
            hooks.append(CollectHook(hook.required("command"), timeout_s, hook.user("user"), service))
    return tuple(hooks)


def _solution_script(folder: Path, solution: TypedFields) -> SolutionScript | None:
    if not (folder / "solve.sh").is_file():
        return None
    return SolutionScript(
        folder,
        "solve.sh",
        {"DEBIAN_FRONTEND": "noninteractive", **solution.variables("env")},
        tuple(str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()),
    )


def _network(agent: TypedFields, environment: TypedFields) -> Network | AllowList:
    """Return the agent's network: `network_mode` of the section `agent`, or else that of `environment`, or else the
    older setting `allow_internet`, which is true by default."""
    for section in (agent, environment):
        mode = (section.text("network_mode") or "").lower().replace("-", "_")
        if section.texts("allowed_hosts") and mode != "allowlist":
            raise TaskError(f'{section.key("allowed_hosts")} needs {section.key("network_mode")} = "allowlist"')
        if mode:
            return _mode(mode, section)
    return Network.OFF if environment.flag("allow_internet") is False else Network.ON


def _mode(mode: str, section: TypedFields) -> Network | AllowList:
    if mode == "public":
        return Network.ON
    if mode == "no_network":
        return Network.OFF
    hosts = section.texts("allowed_hosts")
    if mode != "allowlist":
        raise TaskError(f"{section.key('network_mode')} must be public, no_network or allowlist, not {mode!r}")
    return AllowList(hosts) if hosts else Network.OFF


def _servers(environment: TypedFields) -> tuple[TaskServer, ...]:
    """Return the MCP servers of the agent. Source: `MCPServerConfig` of Harbor 0.26, whose default is `sse`."""
    servers: dict[str, TaskServer] = {}
    for entry in environment.sections("mcp_servers"):
        name, transport = entry.required("name"), entry.text("transport") or "sse"
        if name in servers:
            raise TaskError(f"{entry.key('name')} {name!r:.100} is the name of another server too")
        if transport == "stdio":
            servers[name] = TaskServer(name, command=(entry.required("command"), *entry.texts("args")))
            continue
        if transport not in ("sse", "http", "streamable-http"):
            raise TaskError(f"{entry.key('transport')} must be sse, streamable-http or stdio, not {transport!r:.100}")
        url = entry.required("url")
        if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
            raise TaskError(f"{entry.key('url')} must be an http or https URL, not {url!r:.200}")
        headers = entry.expanded("headers")
        servers[name] = TaskServer(name, url, transport == "sse", headers)
    return tuple(servers.values())


def _skills_dir(environment: TypedFields) -> str | None:
    path = environment.text("skills_dir")
    if path and (not path.startswith("/") or ".." in path.split("/")):
        raise TaskError(f"{environment.key('skills_dir')} must be an absolute path without `..`, not {path!r:.200}")
    return path.rstrip("/") if path else None


def _limits(environment: TypedFields) -> Limits:
    default = Limits()
    try:
        return Limits(
            memory_bytes=environment.size_bytes("memory", "memory_mb") or default.memory_bytes,
            cpus=environment.number("cpus") or None,
            disk_bytes=environment.size_bytes("storage", "storage_mb") or default.disk_bytes,
        )
    except ValueError as error:
        raise TaskError(f"task.toml: {error}") from None


def _steps(config: TypedFields, folder: Path) -> tuple[TaskStep, ...]:
    """Return the steps in order. For a task without steps, the result is empty."""
    steps: dict[str, TaskStep] = {}
    for section in config.sections("steps"):
        name = section.text("name") or ""
        if not _STEP_NAME.fullmatch(name) or name != name.strip(" .") or name.casefold() in map(str.casefold, steps):
            raise TaskError(f"{section.key('name')} must be a folder name that no other step has, not {name!r:.200}")
        place = folder / "steps" / name
        own, task = section.section("verifier"), config.section("verifier")
        merged = own.over(task)
        try:
            steps[name] = TaskStep(
                name=name,
                instruction=_instruction(place / "instruction.md"),
                verifier=_verifier(place / "tests", merged, folder, config, section),
                solution=_solution_script(place / "solution", config.section("solution"))
                or _solution_script(folder / "solution", config.section("solution")),
                min_reward=_min_reward(section),
                workdir=place / "workdir" if (place / "workdir").is_dir() else None,
                agent_timeout_s=section.section("agent").number("timeout_sec"),
                health=_health_check(section.section("healthcheck")) if section.section("healthcheck").values else None,
            )
        except Unsupported:
            raise
        except TaskError as error:
            raise TaskError(f"step {name}: {error}") from None
    if not steps and (folder / "steps").is_dir():
        raise TaskError("it has a folder of steps, but task.toml has no [[steps]]")
    return tuple(steps.values())


def _strategy(config: TypedFields) -> str:
    """Return how the rewards of the steps are combined."""
    strategy = config.text("multi_step_reward_strategy") or MEAN
    if strategy not in (MEAN, FINAL):
        raise TaskError(f"multi_step_reward_strategy must be {MEAN} or {FINAL}, not {strategy!r}")
    return strategy


def _min_reward(section: TypedFields) -> Mapping[str, float]:
    """Return the minimum that each reward must reach for the next step to follow, by name. A single number is the
    minimum of the reward called `reward`."""
    value = section.values.get("min_reward")
    values = {} if value is None else value if isinstance(value, Mapping) else {"reward": value}
    for name, least in values.items():
        if isinstance(least, bool) or not isinstance(least, int | float) or not abs(least) < 1e9:
            raise TaskError(
                f"{section.key('min_reward')} must be a number, or numbers by name, not {value!r:.200} ({name})"
            )
    return {str(name): float(least) for name, least in values.items()}
