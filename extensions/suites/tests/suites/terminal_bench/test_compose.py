"""Compose files as data: what is carried, and what is refused by its name."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from golden_messages import check_message, raises
from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import Limits
from palaestra_slots.images.dockerfile import ImageRecipe
from palaestra_slots.images.task_files import Unsupported
from palaestra_suites.terminal_bench import compose, harbor_task
from palaestra_suites.terminal_bench.compose_values import env_file, interpolated, seconds, size_bytes
from palaestra_suites.terminal_bench.import_tasks import Finding, command, read_tasks
from palaestra_suites.terminal_bench.service import Condition, HealthCheck, Restart, Service
from suites.terminal_bench.shop import COMPOSE, TOML, make_shop

OWN = ImageRecipe(Path("environment"), docker_image="own:1")


def read(folder: Path, text: str, variables: dict[str, str] | None = None, **files: str) -> dict[str, Service]:
    folder.mkdir(exist_ok=True, parents=True)
    for name, content in {"docker-compose.yaml": textwrap.dedent(text), "db/Dockerfile": "FROM x\n", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return compose.read_services(folder, variables or {}, OWN, Limits(memory_bytes=1 << 30))


def one(folder: Path, fields: str, top: str = "") -> Service:
    """Return a service `db` with these keys."""
    return read(folder, f"services:\n  db: {{image: db:1, command: run, {fields}}}\n{top}")["db"]


def test_a_file_with_everything_that_is_carried(tmp_path: Path) -> None:
    task = harbor_task.read_task(make_shop(tmp_path))
    services = {each.name: each for each in task.services}
    assert set(services) == {"main", "shop", "stock", "seed"}, "a service with a profile does not start"
    assert services["shop"].after == {"stock": Condition.HEALTHY, "seed": Condition.COMPLETED}
    assert services["shop"].env == {"STOCK": "http://warehouse:8000/stock.txt", "CURRENCY": "EUR"}
    assert services["shop"].recipe.arguments == (("KIND", "books"),)
    assert (services["shop"].restart, services["shop"].restarts) == (Restart.ON_FAILURE, 5)
    assert services["shop"].folders == ("/data",)
    assert services["stock"].env == {"KIND": "records"}
    assert services["stock"].copies == ((tmp_path / "shop/environment/stock/goods", "/srv/stock"),)
    assert services["stock"].names == ("stock", "warehouse")
    assert services["stock"].limits == Limits(memory_bytes=256 << 20, cpus=0.5)
    assert services["main"].recipe == task.recipe
    assert [(each.service, each.command[:5]) for each in task.verifier.collect] == [("shop", "mkdir")]


def test_main_is_the_tasks_own_image_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    text = "services:\n  db: {image: '${MAIN_IMAGE_NAME}', command: run}\n"
    services = read(tmp_path / "a", text)
    assert services["main"].recipe == services["db"].recipe == OWN
    assert services["main"].limits == Limits(memory_bytes=1 << 30)
    own = read(tmp_path / "b", "services:\n  main: {build: {context: db}, environment: [A=1], mem_limit: 64m}\n")[
        "main"
    ]
    assert own.recipe.dockerfile == (tmp_path / "b/db/Dockerfile")
    assert (dict(own.env), own.limits.memory_bytes) == ({"A": "1"}, 64 << 20)
    whole = "services:\n  main: {build: {context: .., dockerfile: environment/db/Dockerfile, target: tools}}\n"
    recipe = read(tmp_path / "task/environment", whole)["main"].recipe
    assert (recipe.folder, recipe.target) == (tmp_path / "task", "tools")
    logs = "services:\n  main: {volumes: ['${HOST_VERIFIER_LOGS_PATH}:${ENV_VERIFIER_LOGS_PATH}']}\n"
    assert read(tmp_path / "c", logs)["main"].copies == ()


def test_commands_health_checks_and_limits(tmp_path: Path) -> None:
    assert one(tmp_path, "entrypoint: 'sh -c'").entrypoint == ("sh", "-c")
    assert one(tmp_path, "user: 1000, working_dir: /srv, hostname: h").user == "1000"
    assert one(tmp_path, "hostname: h, container_name: c").names == ("db", "c", "h")
    check = one(tmp_path, "healthcheck: {test: 'a && b', interval: 1m30s, timeout: 500ms, start_period: 2s}").health
    assert check == HealthCheck(("/bin/sh", "-c", "a && b"), interval_s=90, timeout_s=0.5, start_s=2)
    assert check.longest_s == 2 + 3 * 90.5
    assert one(tmp_path, "healthcheck: {test: [NONE]}").health is None
    assert one(tmp_path, "restart: unless-stopped").restart is Restart.ALWAYS
    assert one(tmp_path, "extra_hosts: ['a:10.0.0.1', 'b=::1']").hosts == (("a", "10.0.0.1"), ("b", "::1"))
    assert one(tmp_path, "mem_limit: 1g, cpus: 2, pids_limit: 9").limits == Limits(1 << 30, 2.0, 9)
    assert one(tmp_path, "cap_add: [CAP_SETUID], security_opt: ['label=disable'], cap_drop: [ALL]").online
    assert one(tmp_path, "environment: ['A=${COMPOSE_PROJECT_NAME}']").env == {"A": "task"}
    assert one(tmp_path, "ports: ['80:80'], privileged: false, cap_add: [], x-own: 1, tty: true").online
    internal = "networks: {inner: {internal: true}}"
    text = f"services:\n  main: {{networks: [inner, default]}}\n  db: {{image: x, networks: [inner]}}\n{internal}\n"
    assert not read(tmp_path, text)["db"].online


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ("privileged: true", "privileged"),
        ("cap_add: [NET_ADMIN]", "cap_add"),
        ("network_mode: host", "network_mode"),
        ("pid: host", "pid"),
        ("ipc: host", "ipc"),
        ("userns_mode: host", "userns_mode"),
        ("cgroup_parent: x", "cgroup_parent"),
        ("security_opt: [seccomp=unconfined]", "security_opt"),
        ("devices: [/dev/kvm]", "devices"),
        ("gpus: all", "gpus"),
        ("sysctls: {a: 1}", "sysctls"),
        ("extends: {file: ../../outside.yaml, service: db}", "extends"),
        ("volumes_from: [x]", "volumes_from"),
        ("secrets: [x]", "secrets"),
        ("configs: [x]", "configs"),
        ("runtime: runsc", "runtime"),
        ("unheard_of: 1", "unheard_of"),
        ("deploy: {replicas: 2}", "deploy.replicas"),
        ("deploy: {resources: {reservations: {devices: [{capabilities: [gpu]}]}}}", "GPUs"),
        ("build: {context: db, target: 'x y'}", "build.target"),
        ("build: {context: db, ssh: [default]}", "build.ssh"),
        ("build: {context: db, additional_contexts: {a: /}}", "build.additional_contexts"),
        ("build: {context: ../..}", "build.context leads out"),
        ("build: {context: ../tests}", "build.context leads to the tests"),
        ("build: {context: db, dockerfile: ../../Dockerfile}", "build.dockerfile leads out"),
        ("build: {context: db, dockerfile: db/Dockerfile}", "needs Dockerfile, which is missing in environment/db/db/"),
        ("build: /etc", "the path '/etc' of the host"),
        ("build: 'https://example.org/repo.git'", "build needs Dockerfile"),
        ("volumes: ['/var/run/docker.sock:/var/run/docker.sock']", "'/var/run/docker.sock' of the host"),
        ("volumes: ['~/.ssh:/root/.ssh']", "of the host"),
        ("volumes: ['../tests:/tests']", "leads to the tests"),
        ("volumes: ['../../other:/x']", "leads out of"),
        ("volumes: ['..:/x']", "the whole task"),
        ("volumes: ['${HOST_ARTIFACTS_PATH:-./a}:/logs/artifacts']", "log directories"),
        ("volumes: [{type: bind, source: /etc, target: /x}]", "'/etc' of the host"),
        ("volumes: [{type: npipe, source: x, target: /x}]", "npipe"),
        ("volumes: ['./db:/proc']", "'/proc'"),
        ("volumes: ['./db:relative']", "'relative'"),
        ("volumes: ['./db:/a/../../b']", "absolute path"),
        ("volumes: ['nobody:/x']", "'nobody'"),
        ("env_file: /etc/environment", "env_file"),
        ("env_file: ../../.env", "env_file leads out"),
        ("cap_add: [SETUID, NET_RAW]", "cap_add"),
        ("security_opt: ['label=disable', 'seccomp=unconfined']", "security_opt"),
        ("extra_hosts: ['host.docker.internal:host-gateway']", "host-gateway"),
        ("networks: {default: {ipv4_address: 10.0.0.2}}", "ipv4_address"),
        ("networks: [nowhere]", "not declared"),
        ("environment: ['A=${HOME}']", "variable HOME"),
        ("healthcheck: {test: [RUN, x]}", "healthcheck.test"),
        ("healthcheck: {test: x, interval: 5}", "interval"),
        ("restart: sometimes", "restart"),
        ("hostname: 'a b'", "'a b'"),
        ("depends_on: [nobody]", "'nobody'"),
        ("depends_on: [db]", "wait for each other"),
        ("depends_on: {main: {condition: service_healthy}}", "main has no `healthcheck`"),
    ],
)
def test_what_is_refused_by_its_name(tmp_path: Path, fields: str, named: str) -> None:
    with pytest.raises(TaskError) as refused:
        one(tmp_path / "task/environment", fields)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("top", "named"),
    [
        ("include: [../other.yaml]", "include"),
        ("secrets: {a: {file: /etc/shadow}}", "secrets"),
        ("volumes: {v: {driver_opts: {type: none, o: bind, device: /}}}", "volumes.v.driver_opts"),
        ("volumes: {v: {external: true}}", "volumes.v.external"),
        ("networks: {n: {driver: host}}", "networks.n.driver"),
        ("networks: {n: {external: true}}", "networks.n.external"),
    ],
)
def test_what_is_refused_beside_the_services(tmp_path: Path, top: str, named: str) -> None:
    with pytest.raises(Unsupported, match=named.replace(".", r"\.")):
        one(tmp_path, "tty: true", top)


def test_what_slots_cannot_keep_apart_or_share_is_refused(tmp_path: Path) -> None:
    apart = "services:\n  main: {networks: [front]}\n  db: {image: x, networks: [back]}\nnetworks: {front: , back: }\n"
    with raises(Unsupported, "db and main"):
        read(tmp_path, apart)
    shared = "services:\n  main: {volumes: [v:/v]}\n  db: {image: x, volumes: [v:/w]}\nvolumes: {v: }\n"
    with raises(Unsupported, "main"):
        read(tmp_path, shared)
    bound = "services:\n  main: {volumes: ['./db:/v:ro']}\n  db: {image: x, volumes: ['./db:/w:ro']}\n"
    assert read(tmp_path, bound)["main"].copies == ((tmp_path / "db", "/v"),), "nobody writes to it"
    with raises(TaskError):
        read(tmp_path, "services:\n  ..: {image: x}\n")
    many = "services:\n" + "".join(f"  s{number}: {{image: x}}\n" for number in range(40))
    with pytest.raises(Unsupported, match="at most 32"):
        read(tmp_path, many)


def test_links_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/Dockerfile").write_text("FROM x\n")
    (tmp_path / "environment").mkdir()
    (tmp_path / "secret").rename(outside := tmp_path.with_name(f"{tmp_path.name}-secret"))
    (tmp_path / "environment/link").symlink_to(outside)
    for fields in ("volumes: ['./link:/x']", "build: ./link", "env_file: link/Dockerfile"):
        with pytest.raises(Unsupported, match="leads out of"):
            one(tmp_path / "environment", fields)


def test_the_hosts_variables_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the host")
    assert one(tmp_path, "environment: [SECRET, 'A=${SECRET:-none}', 'B=$$SECRET']").env == {
        "A": "none",
        "B": "$SECRET",
    }
    assert "SECRET" in os.environ


LAUGHS = "x-0: &a0 [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]\n" + "".join(
    f"x-{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)
DB = "services:\n  db: {image: db, command: run, %s}\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LAUGHS + DB % "image: *a8", "its aliases repeat too much"),
        ("x-a: &a [*a]\n" + DB % "labels: *a", "its aliases repeat too much"),
        (DB % f"user: 0x{'F' * 5000}", "more than 64 bits"),
        (DB % "env_file: 'a\\0b'".replace("'", '"'), "no text"),
        (DB % 'user: "\\ud800"', "no text"),
        (DB % f"env_file: {'a' * 5000}", "is no path"),
        (DB % f"command: {'a' * 200_000}", "more than 128 KiB"),
        (DB % f"healthcheck: {{test: x, interval: '{'1' * 100_000}'}}", "must be a duration"),
        (DB % "env_file: bomb", "longer than 1 MiB"),
        (DB % f"env_file: [{', '.join(['large'] * 1000)}]", "more than 1 MiB"),
        ("services:\n" + "".join(f"  s{n}: {{image: a, user: '$B'}}\n" for n in range(40)), "has 40 services"),
        (DB % "volumes: ['./large://proc']", "the target '//proc'"),
        (DB % "volumes: ['./large:/./proc']", "the target '/./proc'"),
    ],
)
def test_a_hostile_file_is_refused_quickly(tmp_path: Path, text: str, problem: str) -> None:
    bomb = "B=0123456789abcdef\n" + "B=$B$B\n" * 15 + "".join(f"A{n}=$B$B\n" for n in range(1000))
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment/docker-compose.yaml").write_text(text)
    (tmp_path / "environment/Dockerfile").write_text("FROM x\n")
    (tmp_path / "environment/bomb").write_text(bomb)
    (tmp_path / "environment/large").write_text(f"A={'x' * 1000}\n" * 100)
    with pytest.raises(TaskError, match=problem):
        compose.read_services(tmp_path / "environment", {}, OWN, Limits())


def test_values() -> None:
    known = {"A": "1", "E": ""}
    assert interpolated(["$A ${A} ${B:-x} ${E:-y} ${E-z} ${A:+w}", 3], known, "k") == ["1 1 x y  w", 3]
    with pytest.raises(TaskError, match="write `\\$\\$`"):
        interpolated("${A", known, "k")
    with pytest.raises(Unsupported, match="variable B"):
        interpolated("${B:?missing}", known, "k")
    with pytest.raises(TaskError, match="longer than"):
        interpolated(["${A}"] * 3, {"A": "x" * (400 << 10)}, "k")
    assert (seconds("1m30s", "k"), seconds("250ms", "k")) == (90, 0.25)
    assert (size_bytes("512m", "k"), size_bytes(1024, "k"), size_bytes("1.5GB", "k")) == (512 << 20, 1024, 3 << 29)
    text = "# c\nexport A=1 # note\nB=\"two $A\"\nC='$A'\n\nD=\n"
    assert env_file(text, {}, "f") == {"A": "1", "B": "two 1", "C": "$A", "D": ""}
    with pytest.raises(TaskError, match="f, line 1"):
        env_file("no pair\n", {}, "f")


def test_what_a_task_refuses_with_services(tmp_path: Path) -> None:
    missing = TOML.replace('service = "shop" }', 'service = "bank" }')
    with raises(TaskError, "bank"):
        harbor_task.read_task(make_shop(tmp_path, "a", **{"task.toml": missing}))
    variable = COMPOSE.replace("${CURRENCY:?}", "${PRICE}")
    with raises(Unsupported, "services.shop", "PRICE"):
        harbor_task.read_task(make_shop(tmp_path, "c", **{"environment/docker-compose.yaml": variable}))


def test_a_dry_run_lists_services_and_refusals(tmp_path: Path) -> None:
    make_shop(tmp_path, "good")
    host = COMPOSE.replace("  stock:\n", "  stock:\n    network_mode: host\n")
    make_shop(tmp_path, "host", **{"environment/docker-compose.yaml": host})
    lines = {line.name: line for line in read_tasks(str(tmp_path), []).lines}
    assert lines["good"].finding is Finding.READ
    check_message(lines["good"].reason, "services", "shop", "stock", "seed")
    assert lines["host"].finding is Finding.REFUSED
    assert "services.stock.network_mode" in lines["host"].reason
    done = CliRunner().invoke(command, [str(tmp_path), "--dry-run"])
    assert done.exit_code == 1
    assert (
        "host                             refused: docker-compose.yaml sets services.stock.network_mode" in done.output
    )


def test_the_user_of_main_runs_its_commands(tmp_path: Path) -> None:
    text = "services:\n  main: {user: app, working_dir: /srv}\n  db: {image: x, user: db}\n"
    toml = (
        TOML.replace('workdir = "/app"', "")
        .replace("shop", "db")
        .replace("[environment]", '[[verifier.collect]]\ncommand = "true"\n[environment]')
    )
    task = harbor_task.read_task(make_shop(tmp_path, **{"environment/docker-compose.yaml": text, "task.toml": toml}))
    assert (task.agent.user, task.workdir, task.verifier.user) == ("app", "/srv", None)
    assert [(each.service, each.user) for each in task.verifier.collect] == [("db", None), ("main", "app")]
    files = {"environment/docker-compose.yaml": text, "task.toml": "[agent]\nuser = 'other'\n"}
    shared = harbor_task.read_task(make_shop(tmp_path, **files))
    assert (shared.agent.user, shared.verifier.user) == ("other", "app")
