"""The settings of the backends of this package, which a run's configuration has as attributes.

Each is a flag, such as `--env.docker_image`. Names and defaults are those that existing scripts and command lines use.
"""

from __future__ import annotations

from palaestra_slots.core.config import Settings, host_path, setting


class ContainerSettings(Settings):
    """The containers of sandboxes: how many, and how large."""

    slots_per_container: int = setting(10, "Docker, Singularity, Nomad: maximum slots in one container.", ge=1)
    max_containers: int = setting(10, "Docker, Singularity, Nomad: maximum containers for one image.", ge=1)
    container_cpus: float | None = setting(None, "Docker: cores of one container; None: no limit.", gt=0)
    container_memory: str | None = setting(None, "Docker: memory of one container, such as `4g`; None: no limit.")


class DockerSettings(Settings):
    """Sandboxes in containers of Docker."""

    docker_image: str | None = setting(None, "Docker: the image for tasks that name none; it needs Python 3.11.")
    docker_hosts: list[str] = setting(
        [], "Docker: addresses of daemons; if empty, the daemon that the command `docker` uses."
    )
    docker_privileged: bool = setting(
        False, "Docker: give containers the rights for slots at `userns`, or at `full` for images given as paths."
    )
    docker_runtime: str | None = setting(
        None, "Docker: a runtime of the daemon, such as gVisor's `runsc`; None: the daemon's default."
    )


class SingularitySettings(Settings):
    """Sandboxes in containers of Singularity or Apptainer."""

    singularity_image: str | None = host_path(None, "Singularity: the image for tasks that name none.")


class SSHSettings(Settings):
    """Sandboxes on other machines, by SSH."""

    ssh_hosts: list[str] = setting([], "SSH: the machines, by any name that `ssh` accepts or as user@host:port.")
    ssh_user: str | None = setting(None, "SSH: the user on all machines; None: as in ~/.ssh/config.")
    ssh_port: int | None = setting(None, "SSH: the port on all machines; None: as in ~/.ssh/config.", ge=1, le=65535)
    ssh_key: str | None = host_path(None, "SSH: the file of the private key; None: as in ~/.ssh/config.")
    ssh_slots_per_host: int = setting(64, "SSH: maximum slots on one machine.", ge=1)


class SlurmSettings(Settings):
    """Sandboxes in a job of Slurm."""

    slurm_job: str | None = setting(
        None, "Slurm: the id of the running job whose nodes have the slots; None: the job in which the command runs."
    )
    slurm_slots_per_node: int = setting(64, "Slurm: maximum slots on one node.", ge=1)
