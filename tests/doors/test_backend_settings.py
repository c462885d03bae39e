"""Every setting of a backend in every way to use that backend: it changes what the platform is asked for, or one line
refuses it (F5 of the design).

The rows are generated: the settings come from the configuration, and `MODES` has the ways. What a setting changes is
seen in the command, job, pod or sandbox that the platform gets. Times and ends, which no request shows, have tests of
their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import modal
import pytest

from doors.test_settings_table import SETTINGS, flag
from palaestra.envs.config.build import command_timeout_s, make_pool
from palaestra.envs.config.command_line import CommandLine, Parsed
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra_cloud.kubernetes import KubernetesBackend
from palaestra_cloud.modal import ModalBackend
from palaestra_cloud.nomad import NomadBackend, job_specification
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.backends.registry import is_of_backends
from palaestra_slots.sandbox.backends.remote import PlaceSpec, RemoteBackend
from palaestra_slots.sandbox.backends.spread import SpreadBackend
from palaestra_slots.sandbox.slot import Backend, SlotSpec
from palaestra_tokens.config import APIServerConfig
from stand_ins.fake_modal import FakeModal

MODES: Mapping[str, tuple[str, ...]] = {
    "local": ("local",),
    "local-nothing-kept": ("local", "--env.keep_workspaces", "false"),
    "docker": ("docker", "--env.docker_image", "a:1"),
    "docker-hosts": ("docker", "--env.docker_image", "a:1", "--env.docker_hosts", "tcp://one:2375"),
    "docker=HOST": ("docker=tcp://one:2375", "--env.docker_image", "a:1"),
    "docker-privileged": ("docker", "--env.docker_image", "a:1", "--env.docker_privileged", "true"),
    "singularity": ("singularity", "--env.singularity_image", "/a.sif"),
    "ssh": ("ssh", "--env.ssh_hosts", "one"),
    "ssh=HOST": ("ssh=one",),
    "slurm": ("slurm", "--env.slurm_job", "7"),
    "nomad": ("nomad",),
    "nomad-raw_exec": ("nomad", "--env.driver", "raw_exec"),
    "nomad-TLS": ("nomad", "--env.nomad_address", "https://one:4646"),
    "kubernetes": ("kubernetes", "--env.kubernetes_image", "a:1"),
    "kubernetes-existing-pods": ("kubernetes", "--env.kubernetes_selector", "app=slots"),
    "modal": ("modal",),
    "docker-and-modal": ("docker modal=overflow", "--env.docker_image", "a:1"),
    "ssh-and-docker": ("ssh=one docker=tcp://one:2375", "--env.docker_image", "a:1"),
}
"""The ways to use each backend: the setting `tool_pool_mode`, and the flags that the way needs."""

GENERAL = (
    "acquire_timeout_s", "isolation", "require_sandbox", "slots", "terminal_timeout", "tool_pool_size",
)  # fmt: skip
NAMES = sorted({name for name in SETTINGS if is_of_backends(name)} | set(GENERAL))

VALUES: Mapping[str, tuple[str, ...]] = {
    "driver": ("raw_exec",),
    "isolation": ("userns",),
    "kubernetes_pod_spec": ('{"nodeName": "n"}',),
    "modal_env_vars": ("A=1",),
    "modal_secrets": ("keys",),
    "slurm_job": ("8",),
    "ssh_hosts": ("two",),
    "docker_hosts": ("tcp://two:2375",),
    "docker_image": ("b:1",),
    "kubernetes_image": ("b:1",),
    "kubernetes_selector": ("app=other",),
    "nomad_address": ("https://two:4646",),
    "sandbox_image": ("b:1",),
    "singularity_image": ("/b.sif",),
    "workspace_store_bytes": ("7000000",),
}  # fmt: skip
"""Values where any other value would not fit: an address, an image, a level that every backend can have."""

SEEN_ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "modal_min_sandboxes": ("extensions/cloud/tests/test_modal.py", "min_sandboxes"),
    "keep_workspaces": ("tests/envs/test_kept_workspaces.py", "keep_workspaces"),
    "kubernetes_container": ("extensions/cloud/tests/test_kubernetes.py", "ExistingPods"),
    "nomad_ca_cert": ("extensions/cloud/tests/test_nomad.py", "ca_cert"),
    "nomad_client_cert": ("extensions/cloud/tests/test_nomad.py", "client_cert"),
    "nomad_client_key": ("extensions/cloud/tests/test_nomad.py", "client_key"),
    "nomad_scale_cooldown": ("extensions/cloud/tests/test_nomad.py", "scale_cooldown_s"),
    "nomad_tls_server_name": ("extensions/cloud/tests/test_nomad.py", "tls_server_name"),
    "purge_job_on_shutdown": ("extensions/cloud/tests/test_nomad.py", "purge_job_on_shutdown"),
    "purge_job_on_start": ("extensions/cloud/tests/test_nomad.py", "purge_job_on_start"),
    "workspace_store": ("tests/envs/test_kept_workspaces.py", "workspace_store"),
    "workspace_store_bytes": ("tests/envs/test_kept_workspaces.py", "workspace_store_bytes"),
}
"""What no request shows when the backend starts: the test of it, and the word that this test has for it."""


@pytest.fixture(scope="module")
def platforms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeModal]:
    """Modal's API, and the programs of Slurm that list nodes."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("squeue", "scontrol"):
        (folder / name).write_text("#!/bin/sh\necho n1\n")
        (folder / name).chmod(0o755)
    with FakeModal(secrets={"keys": {"KEY": "hidden"}}) as fake, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        patch.setenv("MODAL_CONFIG_PATH", os.devnull)
        for name, value in fake.variables.items():
            patch.setenv(name, value)
        try:
            yield fake
        finally:
            modal.Client.from_env().close()


def parsed(words: tuple[str, ...]) -> Parsed[HermesAgentEnvConfig, APIServerConfig]:
    found = CommandLine("x", HermesAgentEnvConfig, APIServerConfig, command="process").parse(
        ["--env.tool_pool_mode", *words], {}
    )
    assert isinstance(found, Parsed)
    return found


def _words(name: str) -> tuple[str, ...]:
    """Return a flag that gives the setting a value other than its default."""
    return ("--env." + name, *VALUES[name]) if name in VALUES else tuple(flag(name))


def asked(words: tuple[str, ...], fake: FakeModal) -> JSON:
    """Return what the platform is asked for with these flags. Raises `ConfigError` as a run does."""
    line = parsed(words)
    config = line.env_config
    config.check_runnable(line.sources)
    pool = make_pool(config)
    limits = (pool.config.max_slots, pool.config.acquire_timeout, command_timeout_s(config))
    return repr((limits, *_of(pool.backend, fake)))


def _of(backend: Backend, fake: FakeModal) -> Iterator[JSON]:
    if isinstance(backend, SpreadBackend):
        for part in backend._parts:  # what Modal gets is seen where it is alone
            yield (
                part.overflow,
                *([part.backend.config] if isinstance(part.backend, ModalBackend) else _of(part.backend, fake)),
            )
        return
    if isinstance(backend, LocalBackend):
        yield backend._request, backend._host_ports
        return
    assert isinstance(backend, RemoteBackend)
    yield backend._wanted, backend._required, backend.capacity, backend._most, vars(backend.gate)
    yield backend.hosts.drain_file, backend.hosts.names
    match backend:
        case ModalBackend():
            yield asyncio.run(_sandbox(backend, fake))
        case NomadBackend():
            yield job_specification(backend.config, backend.config.sandbox_job_id, backend._image, {}, "token")
            yield backend._api.address, backend._api._headers, backend.config.access.query
        case KubernetesBackend():
            yield backend.exec_in("pod", ["python3", "-I", "-S", "-c", "pass"]), backend._existing
            if not backend.uses_existing:
                pod = backend.new_pod(backend.place_spec(SlotSpec()))
                del pod._pod["metadata"]["name"], pod._pod["metadata"]["labels"]
                yield pod._pod, pod._start_s
        case _:
            for host in backend.hosts.names:
                words = backend.command(PlaceSpec(host=host, image=backend._image), ["python3"])
                yield [re.sub(r"docker-groups-\w+", "FOLDER", word) for word in words]


async def _sandbox(backend: ModalBackend, fake: FakeModal) -> JSON:
    """Return what Modal's API gets for one sandbox, without the ids that it gave."""
    before = set(fake.sandboxes)
    await backend.check_hosts()
    sandbox = await backend.make_sandbox(backend.place_spec(SlotSpec()))
    await sandbox.terminate.aio()
    (made,) = (fake.sandboxes[each] for each in set(fake.sandboxes) - before)
    definition = re.sub(r'"\w\w-\d+"', "ID", str(made.definition))
    return made.app_id, definition, made.image, made.variables, backend.config.acquire_timeout_s


@pytest.mark.slots
@pytest.mark.parametrize("mode", sorted(MODES))
def test_a_setting_changes_what_the_platform_is_asked_for_or_is_refused(mode: str, platforms: FakeModal) -> None:
    plain = asked(MODES[mode], platforms)
    assert asked(MODES[mode], platforms) == plain, "nothing but the settings changes what is asked for"
    silent, unclear = [], []
    for name in NAMES:
        words = _words(name)
        given = MODES[mode][1:]
        if words[0] in given:
            continue  # the way itself sets it; another way shows what it does
        try:
            changed = asked((*MODES[mode], *words), platforms)
        except ConfigError as refused:
            if name not in str(refused) or "\n" in str(refused):
                unclear.append(f"{name}: {refused}")
            continue
        if changed == plain and name not in SEEN_ELSEWHERE:
            silent.append(name)
    assert not silent, f"{mode}: ignored in silence"
    assert not unclear, f"{mode}: refused without its name, or in several lines"


@pytest.mark.parametrize("name", sorted(SEEN_ELSEWHERE))
def test_what_no_request_shows_has_a_test_of_its_own(name: str) -> None:
    file, word = SEEN_ELSEWHERE[name]
    assert word in (Path(__file__).parents[2] / file).read_text()


def test_every_setting_of_a_backend_is_in_force_somewhere(platforms: FakeModal) -> None:
    """A setting that every way refuses would be no setting. `backend_options` are those of other packages."""
    certified = (*MODES["nomad-TLS"], "--env.nomad_client_cert", "/c")  # the backend itself reads the file
    for name in set(NAMES) - {"backend_options"}:
        words = _words(name)
        modes = (*MODES.values(), certified)
        assert any(words[0] in mode or _is_taken((*mode, *words)) for mode in modes), name


def _is_taken(words: tuple[str, ...]) -> bool:
    line = parsed(words)
    with contextlib.suppress(ConfigError):
        line.env_config.check_runnable(line.sources)
        return True
    return False
