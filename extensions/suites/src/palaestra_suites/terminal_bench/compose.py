"""Read a task's compose file as data: which services it has, and how they start.

Nothing of the file is run, and no path of it leads out of the task's folder or to its tests and solutions. `_CARRIED`
lists the keys that a service's slot honours, and `_NO_EFFECT` those that cannot change what its program does there. Any
other key with a value rejects the task by the key's name, such as `privileged`, `network_mode` or `extends`.

Source: the Compose specification (compose-spec, `05-services.md` to `09-secrets.md`), and the order in which Harbor
0.25 merges the file: over a service `main` with the task's own image, whose command is `sleep infinity`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import JSON, Limits
from palaestra_slots.images.dockerfile import ImageRecipe
from palaestra_slots.images.task_files import Unsupported, read_task_text, read_yaml_file
from palaestra_suites.terminal_bench.compose_values import (
    check_values,
    env_file,
    interpolated,
    pairs,
    positive_number,
    seconds,
    size_bytes,
    words,
)
from palaestra_suites.terminal_bench.service import MAIN, Condition, HealthCheck, Restart, Service, in_order

COMPOSE_NAME = "docker-compose.yaml"
MOST_SERVICES = 32
OWN_IMAGE = "palaestra-main-image"
"""What `MAIN_IMAGE_NAME` and `PREBUILT_IMAGE_NAME` stand for: the task's own image."""

_CARRIED = frozenset(
    {
        *("build", "image", "environment", "env_file", "volumes", "tmpfs", "depends_on", "healthcheck", "entrypoint"),
        *("command", "working_dir", "user", "restart", "hostname", "container_name", "networks", "deploy", "mem_limit"),
        *("cpus", "pids_limit", "profiles", "extra_hosts"),
    }
)
_NO_EFFECT = frozenset(
    {
        *("ports", "expose"),  # services reach every port of each other, and nobody else reaches any
        *("annotations", "attach", "cap_drop", "develop", "init", "labels", "logging", "platform", "pull_policy"),
        *("read_only", "shm_size", "stdin_open", "stop_grace_period", "stop_signal", "tty", "ulimits"),
        *("cpu_shares", "mem_reservation", "mem_swappiness", "memswap_limit", "oom_score_adj", "cpu_count"),
    }
)
_TOP_NO_EFFECT = frozenset({"name", "version"})
_HARMLESS: Mapping[str, frozenset[str]] = {
    "cap_add": frozenset({"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE"})
    | {"SETGID", "SETUID"},
    "security_opt": frozenset({"no-new-privileges", "no-new-privileges:true", "label=disable", "label:disable"}),
}
"""Values of refused keys that ask for nothing but what every slot has."""

_HIDDEN = frozenset({"tests", "solution", "steps", "cheat", "run-tests.sh", "solution.sh", "solution.yaml"})
"""The files and folders of a task that no service may see."""

_LOGS = tuple(f"${{HOST_{name}_PATH" for name in ("VERIFIER_LOGS", "AGENT_LOGS", "ARTIFACTS")) + tuple(
    f"${{T_BENCH_TASK_{name}_PATH" for name in ("LOGS", "AGENT_LOGS")
)
"""The variables of Harbor's and Terminal-Bench's own mounts, which tasks repeat. Slots have these directories."""

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}")
_MOST_ENV_BYTES = 1 << 20
_KERNEL = ("/", "/proc", "/sys", "/dev")


def single_service(path: Path) -> dict[str, JSON]:
    """Return the only service of a compose file, or an empty mapping if the file does not exist.

    Raises `Unsupported` if there are several services, or if the service needs privileges, devices or GPUs. Raises
    `TaskError` if the file is not a compose file.
    """
    if not path.is_file():
        return {}
    services = _services_of(read_yaml_file(path), path.name)
    if len(services) > 1:
        raise Unsupported(
            f"it needs {len(services)} containers ({', '.join(map(str, services))}), but a slot is one container"
        )
    service = next(iter(services.values()))
    for key in ("privileged", "devices", "gpus"):
        if service.get(key):
            raise Unsupported(f"its service sets {key}, which slots do not support")
    return service


def read_services(
    folder: Path,
    variables: Mapping[str, str],
    own: ImageRecipe | None,
    limits: Limits,
    *,
    task: Path | None = None,
    agents: str = MAIN,
    file: str = COMPOSE_NAME,
    offline: bool = False,
) -> dict[str, Service]:
    """Return the services of the compose file in a folder by name; empty without such a file. With one, `main` is
    always among them: the service that the file calls `agents`. `task` is the task's folder, by default the one above.
    `file` is the file's name. If `offline`, slots have no network, so that the only service may ask for none.

    `variables` are all that the file may refer to, besides those that Harbor sets. `own` is the recipe of the task's
    image, if it has one, and `limits` are those of `main`. Raises `Unsupported` for a key that slots cannot carry, and
    `TaskError` for a file that cannot be read.
    """
    path = folder / file
    if not path.is_file():
        return {}
    content = read_yaml_file(path)
    try:
        return _read_services(path, content, variables, own, limits, task or folder.parent, agents, offline=offline)
    except (TaskError, Unsupported) as error:
        text = str(error).replace(COMPOSE_NAME, file).replace(f"services.{MAIN}", f"services.{agents}")
        raise type(error)(text) from error


def _read_services(
    path: Path,
    content: JSON,
    variables: Mapping[str, str],
    own: ImageRecipe | None,
    limits: Limits,
    task: Path,
    agents: str,
    *,
    offline: bool,
) -> dict[str, Service]:
    check_values(content, path.name)
    found = _services_of(content, path.name)
    _check_top(content, path.name)
    known = {
        "CONTEXT_DIR": ".",
        "COMPOSE_PROJECT_NAME": "task",
        "MAIN_IMAGE_NAME": OWN_IMAGE,
        "PREBUILT_IMAGE_NAME": OWN_IMAGE,
        "TEST_DIR": "/tests",
        **variables,
    }
    reader = _Reader(path.parent, task, known, own, limits, content)
    if agents != MAIN and MAIN in found:
        raise Unsupported(f"{path.name} has a service {MAIN} besides {agents}, in which the agent works")
    found = {MAIN if name == agents else name: fields for name, fields in found.items()}
    found = {name: fields for name, fields in found.items() if not fields.get("profiles")}
    if offline and len(found) == 1:
        found = {
            name: {key: value for key, value in fields.items() if (key, value) != ("network_mode", "none")}
            for name, fields in found.items()
        }
    if len(found.keys() | {MAIN}) > MOST_SERVICES:
        raise Unsupported(f"{path.name} has {len(found)} services, but a group of slots has at most {MOST_SERVICES}")
    services = {name: reader.service(name, fields) for name, fields in found.items()}
    if MAIN not in services:
        services[MAIN] = reader.service(MAIN, {})
    if agents != MAIN:
        services = {name: _with_main(each, agents) for name, each in services.items()}
    reader.check_together(services)
    return services


def _with_main(service: Service, agents: str) -> Service:
    """Return a service of a file that calls `main` by another name."""
    after = {MAIN if name == agents else name: condition for name, condition in service.after.items()}
    names = service.names if service.name != MAIN else tuple(dict.fromkeys([agents, *service.names[1:]]))
    return replace(service, after=after, names=names)


def _services_of(content: JSON, name: str) -> dict[str, dict[str, JSON]]:
    services = content.get("services") if isinstance(content, dict) else None
    if not isinstance(services, dict) or not services:
        raise TaskError(f"{name} names no services")
    if not all(isinstance(fields, dict | None) for fields in services.values()):
        raise TaskError(f"{name}: its service must be a mapping")
    return {str(service): fields or {} for service, fields in services.items()}


def _check_top(content: Mapping[str, JSON], file: str) -> None:
    for key, value in content.items():
        known = key in ("services", "volumes", "networks") or key in _TOP_NO_EFFECT or str(key).startswith("x-")
        if not known and not _is_nothing(value):
            raise Unsupported(f"{file} sets {str(key)!r:.100}, which slots do not support")
    for kind, harmless in (("volumes", {"name", "labels"}), ("networks", {"name", "labels", "internal", "attachable"})):
        for name, fields in _mapping(content.get(kind), f"{file}: {kind}").items():
            key = f"{kind}.{name}"
            for each, value in _mapping(fields, f"{file}: {key}").items():
                usual = each == "driver" and value in ("local", "bridge")
                if each not in harmless and not usual and not _is_nothing(value):
                    raise Unsupported(f"{file} sets {key}.{each}, which slots do not support")


class _Reader:
    """Reads the services of one file. `folder` is the folder of the file."""

    def __init__(
        self,
        folder: Path,
        task: Path,
        known: Mapping[str, str],
        own: ImageRecipe | None,
        limits: Limits,
        content: JSON,
    ) -> None:
        self._folder, self._known, self._own, self._limits = folder, known, own, limits
        self._task = task.resolve()
        self._internal = {
            name
            for name, fields in _mapping(content.get("networks"), "networks").items()
            if isinstance(fields, dict) and fields.get("internal") is True
        }
        self._declared = {"default", *_mapping(content.get("networks"), "networks")}
        self._volumes = _mapping(content.get("volumes"), "volumes")
        self._networks: dict[str, frozenset[str]] = {}
        self._env_left = _MOST_ENV_BYTES
        self._mounted: dict[str, set[str]] = {}
        """The services that may write to each named volume or directory of the task."""

    def service(self, name: str, fields: Mapping[str, JSON]) -> Service:
        """Return one service."""
        where = f"services.{name}"
        if not _NAME.fullmatch(name):
            raise TaskError(f"{COMPOSE_NAME}: {name!r:.100} is not the name of a service")
        for key, value in fields.items():
            known = key in _CARRIED | _NO_EFFECT or str(key).startswith("x-")
            if not known and not _is_nothing(value) and not _is_harmless(str(key), value):
                raise Unsupported(f"{COMPOSE_NAME} sets {where}.{str(key)[:100]}, which slots do not support")
        volumes = _checked_list(fields.get("volumes"), where)
        if name != MAIN and any(map(_is_log_mount, volumes)):
            raise Unsupported(
                f"{COMPOSE_NAME}: {where}.volumes shares Harbor's log directories, but slots share no files"
            )
        volumes = [each for each in volumes if not _is_log_mount(each)]
        fields = interpolated({**fields, "volumes": volumes}, self._known, f"{COMPOSE_NAME}: {where}")
        copies, folders = self._mounts(name, fields["volumes"], f"{where}.volumes")
        folders += [str(each).partition(":")[0] for each in words(fields.get("tmpfs"), f"{where}.tmpfs") or ()]
        networks, names = self._names(fields.get("networks"), f"{where}.networks")
        self._networks[name] = networks
        restart, restarts = _restart(fields.get("restart"), f"{where}.restart")
        for target in (*(target for _, target in copies), *folders):
            _check_target(target, f"{where}.volumes")
        return Service(
            name=name,
            recipe=self._recipe(name, fields, where),
            env=self._env(fields, where),
            entrypoint=words(fields.get("entrypoint"), f"{where}.entrypoint"),
            command=words(fields.get("command"), f"{where}.command"),
            workdir=_text_field(fields.get("working_dir"), f"{where}.working_dir"),
            user=_text_field(fields.get("user"), f"{where}.user"),
            after=_after(fields.get("depends_on"), f"{where}.depends_on"),
            health=_health_check(fields.get("healthcheck"), f"{where}.healthcheck"),
            restart=restart,
            restarts=restarts,
            names=tuple(dict.fromkeys([name, *names, *self._own_names(fields, where)])),
            copies=tuple(copies),
            folders=tuple(folders),
            hosts=tuple(_hosts(fields.get("extra_hosts"), f"{where}.extra_hosts")),
            limits=_service_limits(fields, where, self._limits if name == MAIN else Limits()),
            online=not networks <= self._internal,
        )

    def check_together(self, services: Mapping[str, Service]) -> None:
        """Raise an error for services that cannot run together as the file says."""
        for service in services.values():
            for other, condition in service.after.items():
                key = f"{COMPOSE_NAME}: services.{service.name}.depends_on"
                if other not in services:
                    raise TaskError(f"{key} names {other!r:.100}, which is not a service that starts")
                if condition is Condition.HEALTHY and services[other].health is None:
                    raise Unsupported(f"{key}.{other} waits for its health, but {other} has no `healthcheck` there")
        try:
            in_order(services)
        except ValueError as error:
            raise TaskError(f"{COMPOSE_NAME}: {error}") from None
        for one, other in combinations(sorted(services), 2):
            if self._networks[one].isdisjoint(self._networks[other]):
                raise Unsupported(f"its networks keep {one} and {other} apart, but all slots of a group share one")
        for source, users in self._mounted.items():
            if len(users & set(services)) > 1:
                raise Unsupported(f"{', '.join(sorted(users))} share the volume {source}, but slots share no files")

    def _recipe(self, name: str, fields: Mapping[str, JSON], where: str) -> ImageRecipe:
        build, image = fields.get("build"), _text_field(fields.get("image"), f"{where}.image")
        if build is None:
            if image in (None, OWN_IMAGE) and (name == MAIN or image):
                if self._own is None:
                    raise TaskError("environment/Dockerfile is missing, and environment.docker_image names no image")
                return self._own
            if not image:
                raise TaskError(f"{COMPOSE_NAME}: {where} has neither `build` nor `image`")
            return ImageRecipe(self._folder, docker_image=image)
        if isinstance(build, str):
            build = {"context": build}
        known = _mapping(build, f"{where}.build")
        for key, value in known.items():
            if key not in ("context", "dockerfile", "args", "target", "labels", "pull", "no_cache") and not _is_nothing(
                value
            ):
                raise Unsupported(f"{COMPOSE_NAME} sets {where}.build.{key!s:.100}, which slots do not support")
        context = self._inside(str(known.get("context") or "."), f"{where}.build.context")
        dockerfile = context / str(known.get("dockerfile") or "Dockerfile")
        self._check_inside(dockerfile, f"{where}.build.dockerfile", context)
        if not dockerfile.is_file():
            place = dockerfile.parent.relative_to(self._task)
            raise TaskError(f"{COMPOSE_NAME}: {where}.build needs {dockerfile.name}, which is missing in {place}/")
        arguments = pairs(known.get("args"), f"{where}.build.args", self._known)
        if any("$" in value for value in arguments.values()):
            raise Unsupported(f"{COMPOSE_NAME}: {where}.build.args has a value with `$`, which slots do not support")
        timeout_s = 600.0 if self._own is None else self._own.build_timeout_s
        target = _text_field(known.get("target"), f"{where}.build.target") or ""
        if target and not _NAME.fullmatch(target):
            raise TaskError(f"{COMPOSE_NAME}: {where}.build.target is {target!r:.100}, not the name of a stage")
        if context == self._folder.resolve():
            context, dockerfile = self._folder, self._folder / dockerfile.relative_to(context)
        return ImageRecipe(context, dockerfile, None, timeout_s, tuple(sorted(arguments.items())), target)

    def _env(self, fields: Mapping[str, JSON], where: str) -> dict[str, str]:
        found: dict[str, str] = {}
        files = fields.get("env_file")
        for each in [files] if isinstance(files, str | dict) else _checked_list(files, f"{where}.env_file"):
            entry = {"path": each} if isinstance(each, str) else _mapping(each, f"{where}.env_file")
            path = self._inside(str(entry.get("path") or ""), f"{where}.env_file")
            if not path.is_file() and entry.get("required") is False:
                continue
            text = read_task_text(path, max_bytes=_MOST_ENV_BYTES)
            self._env_left -= len(text)
            if self._env_left < 0:
                raise TaskError(f"{COMPOSE_NAME}: its `env_file` entries have more than {_MOST_ENV_BYTES >> 20} MiB")
            found |= env_file(text, self._known, path.name)
        return found | pairs(fields.get("environment"), f"{where}.environment", self._known)

    def _mounts(self, name: str, volumes: JSON, where: str) -> tuple[list[tuple[Path, str]], list[str]]:
        """Return the files to copy, and the directories to make."""
        copies: list[tuple[Path, str]] = []
        folders: list[str] = []
        for each in volumes:
            source, target, read_only = _mount(each, where)
            if not source:
                folders.append(target)
            elif source[0] in "./~" or "/" in source:
                path = self._inside(source, where)
                if path == self._task:
                    raise Unsupported(
                        f"{COMPOSE_NAME}: {where} mounts the whole task with its tests, which no slot sees"
                    )
                if not path.exists():
                    raise TaskError(f"{COMPOSE_NAME}: {where} names {source!r:.100}, which is missing")
                copies.append((path, target))
                if not read_only:
                    self._mounted.setdefault(str(path.relative_to(self._task)), set()).add(name)
            else:
                if source not in self._volumes:
                    raise TaskError(f"{COMPOSE_NAME}: {where} names the volume {source!r:.100}, which is not declared")
                folders.append(target)
                self._mounted.setdefault(source, set()).add(name)
        return copies, folders

    def _names(self, networks: JSON, where: str) -> tuple[frozenset[str], list[str]]:
        """Return the networks of a service, and its further names."""
        names: list[str] = []
        if isinstance(networks, dict):
            for network, fields in networks.items():
                for key, value in _mapping(fields, f"{where}.{network}").items():
                    if key == "aliases":
                        names += words(value, f"{where}.{network}.aliases") or ()
                    elif key not in ("priority", "gw_priority") and not _is_nothing(value):
                        raise Unsupported(f"{COMPOSE_NAME} sets {where}.{network}.{key}, which slots do not support")
        chosen = frozenset(map(str, networks or ["default"]))
        if not chosen <= self._declared:
            raise TaskError(f"{COMPOSE_NAME}: {where} names a network that is not declared")
        _check_names(names, where)
        return chosen, names

    def _own_names(self, fields: Mapping[str, JSON], where: str) -> list[str]:
        found = [_text_field(fields.get(key), f"{where}.{key}") for key in ("container_name", "hostname")]
        names = [each for each in found if each]
        _check_names(names, where)
        return names

    def _inside(self, path: str, where: str) -> Path:
        """Return a path below the task's folder, without links. Raises `TaskError`."""
        if not path or path[0] in "/~":
            raise Unsupported(f"{COMPOSE_NAME}: {where} names the path {path!r:.100} of the host, which no slot sees")
        found = _resolved(self._folder / path, where)
        self._check_inside(found, where, self._task)
        return found

    def _check_inside(self, path: Path, where: str, root: Path) -> None:
        path = _resolved(path, where)
        if not path.is_relative_to(root.resolve()):
            raise Unsupported(f"{COMPOSE_NAME}: {where} leads out of {root.name}/, which no slot sees")
        if path != self._task and path.relative_to(self._task).parts[0] in _HIDDEN:
            raise Unsupported(f"{COMPOSE_NAME}: {where} leads to the tests or solutions, which no slot sees")


def _resolved(path: Path, where: str) -> Path:
    try:
        found = path.resolve()
        found.exists()  # which a path that is too long does not survive
    except (OSError, RuntimeError) as error:
        raise TaskError(f"{COMPOSE_NAME}: {where} is no path: {str(error)[:100]}") from None
    return found


def _is_harmless(key: str, value: JSON) -> bool:
    return isinstance(value, list) and all(str(each).removeprefix("CAP_") in _HARMLESS.get(key, ()) for each in value)


def _is_nothing(value: JSON) -> bool:
    return value is None or value is False or value in ("", [], {})


def _mapping(value: JSON, where: str) -> dict[str, JSON]:
    if value is not None and not isinstance(value, dict):
        raise TaskError(f"{where} must be a mapping, not {value!r:.100}")
    return {str(key): each for key, each in (value or {}).items()}


def _checked_list(value: JSON, where: str) -> list[JSON]:
    if value is not None and not isinstance(value, list):
        raise TaskError(f"{COMPOSE_NAME}: {where} has {value!r:.100} in place of a list")
    return value or []


def _text_field(value: JSON, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise TaskError(f"{COMPOSE_NAME}: {where} must be text, not {value!r:.100}")
    return str(value)


def _check_names(names: Collection[str], where: str) -> None:
    for name in names:
        if not _NAME.fullmatch(name):
            raise TaskError(f"{COMPOSE_NAME}: {where}: {name!r:.100} is not the name of a host")


def _is_log_mount(volume: JSON) -> bool:
    source = volume.get("source") if isinstance(volume, dict) else volume
    return isinstance(source, str) and source.startswith(_LOGS)


def _mount(volume: JSON, where: str) -> tuple[str, str, bool]:
    """Return the source of a mount (empty without one), its target, and whether it is read-only."""
    if isinstance(volume, str):
        parts = volume.split(":")
        if len(parts) > 3:
            raise TaskError(f"{COMPOSE_NAME}: {where} has {volume!r:.100}, which is not SOURCE:TARGET[:MODE]")
        if len(parts) == 1:
            return "", parts[0], False
        return parts[0], parts[1], "ro" in (parts[2] if len(parts) == 3 else "").split(",")
    fields = _mapping(volume, where)
    kind, source, target = fields.get("type"), fields.get("source") or "", fields.get("target")
    if kind not in ("volume", "bind", "tmpfs") or not isinstance(target, str) or not isinstance(source, str):
        raise Unsupported(f"{COMPOSE_NAME}: {where} has the mount {volume!r:.100}, which slots do not support")
    for key, value in fields.items():
        if key not in ("type", "source", "target", "read_only", "bind", "volume", "tmpfs", "consistency"):
            raise Unsupported(f"{COMPOSE_NAME} sets {where}.{key}, which slots do not support")
        if key == "volume" and _mapping(value, where).get("subpath"):
            raise Unsupported(f"{COMPOSE_NAME} sets {where}.volume.subpath, which slots do not support")
    if kind == "bind" and source[:1] not in (".", "/", "~"):
        source = f"./{source}"
    return "" if kind == "tmpfs" else source, target, fields.get("read_only") is True


def _check_target(target: str, where: str) -> None:
    path = "/" + "/".join(part for part in target.split("/") if part not in ("", "."))
    if not target.startswith("/") or ".." in path.split("/"):
        raise TaskError(f"{COMPOSE_NAME}: {where} has the target {target!r:.100}, which must be an absolute path")
    if path in _KERNEL or path.startswith(tuple(f"{each}/" for each in _KERNEL[1:] if each != "/dev")):
        raise Unsupported(f"{COMPOSE_NAME}: {where} has the target {target!r:.100}, which slots do not support")


def _after(value: JSON, where: str) -> dict[str, Condition]:
    if isinstance(value, list):
        return {str(name): Condition.STARTED for name in value}
    found = {}
    for name, fields in _mapping(value, where).items():
        condition = _mapping(fields, where).get("condition") or Condition.STARTED
        if condition not in list(Condition):
            raise TaskError(f"{COMPOSE_NAME}: {where}.{name}.condition must be one of {', '.join(Condition)}")
        found[name] = Condition(condition)
    return found


def _health_check(value: JSON, where: str) -> HealthCheck | None:
    fields = _mapping(value, where)
    test = fields.get("test")
    command = ("CMD-SHELL", test) if isinstance(test, str) else words(test, f"{where}.test") or ()
    if fields.get("disable") is True or not command or command[0] == "NONE":
        return None
    for key in fields:
        if key not in ("test", "interval", "timeout", "retries", "start_period", "start_interval", "disable"):
            raise Unsupported(f"{COMPOSE_NAME} sets {where}.{key}, which slots do not support")
    if command[0] not in ("CMD", "CMD-SHELL") or len(command) < 2:
        raise TaskError(f"{COMPOSE_NAME}: {where}.test must begin with CMD, CMD-SHELL or NONE")
    argv = ("/bin/sh", "-c", command[1]) if command[0] == "CMD-SHELL" else command[1:]
    usual = HealthCheck(argv)

    def time(key: str, default: float) -> float:
        return default if fields.get(key) is None else seconds(fields[key], f"{where}.{key}")

    return HealthCheck(
        argv,
        interval_s=time("interval", usual.interval_s),
        timeout_s=time("timeout", usual.timeout_s),
        retries=int(positive_number(fields.get("retries") or usual.retries, f"{where}.retries")),
        start_s=time("start_period", usual.start_s),
    )


def _restart(value: JSON, where: str) -> tuple[Restart, int | None]:
    text = "no" if value in (None, False) else str(value)
    policy, colon, most = text.partition(":")
    if policy == "unless-stopped":
        policy = Restart.ALWAYS
    if policy not in list(Restart) or (colon and (policy != Restart.ON_FAILURE or not most.isdecimal())):
        raise TaskError(f"{COMPOSE_NAME}: {where} must be no, always, on-failure[:COUNT] or unless-stopped")
    return Restart(policy), int(most[:6]) if colon else None


def _hosts(value: JSON, where: str) -> Iterator[tuple[str, str]]:
    entries: Sequence[tuple[str, JSON]]
    if isinstance(value, dict):
        entries = [(str(name), address) for name, address in value.items()]
    else:
        texts = [str(each).replace("=", ":", 1) for each in _checked_list(value, where)]
        entries = [(text.partition(":")[0], text.partition(":")[2]) for text in texts]
    for name, address in entries:
        _check_names([name], where)
        plain = str(address).strip("[]")
        if not plain or not all(each in "0123456789abcdefABCDEF.:" for each in plain):
            raise Unsupported(f"{COMPOSE_NAME}: {where} names {str(address)!r:.100}, which is not an address")
        yield name, plain


def _service_limits(fields: Mapping[str, JSON], where: str, default: Limits) -> Limits:
    deploy = _mapping(fields.get("deploy"), f"{where}.deploy")
    resources = _mapping(deploy.get("resources"), f"{where}.deploy.resources")
    if (replicas := deploy.get("replicas")) not in (None, 1):
        raise Unsupported(f"{COMPOSE_NAME} sets {where}.deploy.replicas to {replicas!r:.20}, but a service is one slot")
    if _mapping(resources.get("reservations"), where).get("devices"):
        raise Unsupported(f"{COMPOSE_NAME} sets {where}.deploy.resources.reservations.devices: it needs GPUs")
    most = _mapping(resources.get("limits"), f"{where}.deploy.resources.limits")
    memory = most.get("memory", fields.get("mem_limit"))
    cpus, pids = most.get("cpus", fields.get("cpus")), most.get("pids", fields.get("pids_limit"))
    found = default
    try:
        if memory not in (None, 0, "0"):
            found = replace(found, memory_bytes=size_bytes(memory, f"{where}: the limit of memory"))
        if cpus not in (None, 0, "0"):
            found = replace(found, cpus=positive_number(cpus, f"{where}: the limit of cpus"))
        if pids not in (None, 0, -1):
            found = replace(found, pids=int(positive_number(pids, f"{where}: the limit of pids")))
    except ValueError as error:
        raise TaskError(f"{COMPOSE_NAME}: {error}") from None
    return found
