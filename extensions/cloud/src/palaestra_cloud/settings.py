"""The settings of these backends.

A run's configuration has each of them as an attribute, and each is a flag, such as `--env.modal_gpu`. Names and
defaults are those that existing scripts and command lines use.
"""

from __future__ import annotations

from palaestra_slots.core.config import Settings, host_path, setting
from palaestra_slots.core.types import JSON


class KubernetesSettings(Settings):
    """Sandboxes in pods of a Kubernetes cluster."""

    kubernetes_image: str | None = setting(
        None, "Kubernetes: make pods of this image, for tasks that name none; it needs Python 3.11."
    )
    kubernetes_selector: str | None = setting(
        None, "Kubernetes: use the existing pods with these labels, such as `app=slots`, instead of making pods."
    )
    kubernetes_container: str | None = setting(
        None, "Kubernetes: the container of existing pods that has the slots; None: their default container."
    )
    kubernetes_context: str | None = setting(None, "Kubernetes: the context of the kubeconfig; None: the current one.")
    kubernetes_namespace: str | None = setting(None, "Kubernetes: the namespace of the pods; None: the context's.")
    kubernetes_pods: int = setting(1, "Kubernetes: maximum pods that are made for one image.", ge=1)
    kubernetes_slots_per_pod: int = setting(10, "Kubernetes: maximum slots in one pod.", ge=1)
    kubernetes_cpus: float | None = setting(None, "Kubernetes: cores of one pod; None: no request, no limit.", gt=0)
    kubernetes_memory: str | None = setting(
        None, "Kubernetes: memory of one pod, such as `8Gi`; None: no request, no limit."
    )
    kubernetes_disk: str | None = setting(
        None, "Kubernetes: disk of one pod, such as `50Gi`; None: no request, no limit."
    )
    kubernetes_start_s: float = setting(
        600.0, "Kubernetes: seconds in which a pod must be ready, with the start of its node and its image pull.", gt=0
    )
    kubernetes_deadline_s: float = setting(
        86400.0, "Kubernetes: seconds after which the cluster ends a pod, whatever runs in it.", ge=60
    )
    kubernetes_pod_spec: dict[str, JSON] = setting(
        {}, "Kubernetes: additional fields of the pod's spec, such as nodeSelector, tolerations, imagePullSecrets."
    )


class ModalSettings(Settings):
    """Sandboxes in Modal."""

    modal_app_name: str = setting("atropos-sandbox", "Modal: the app that the sandboxes belong to.")
    modal_image: str = setting("python:3.11", "Modal: the image for tasks that name none; it needs Python 3.11.")
    modal_gpu: str | None = setting(None, "Modal: the GPU of a sandbox, such as `T4`.")
    modal_cpu: float = setting(1.0, "Modal: cores of a sandbox.", gt=0)
    modal_memory: int = setting(2048, "Modal: memory of a sandbox in megabytes.", ge=128)
    modal_slots_per_sandbox: int = setting(10, "Modal: maximum slots in one sandbox.", ge=1)
    modal_min_sandboxes: int = setting(1, "Modal: sandboxes to keep running without slots.", ge=0)
    modal_max_sandboxes: int = setting(5, "Modal: maximum number of sandboxes.", ge=1)
    modal_idle_timeout: int = setting(
        120, "Modal: seconds until a sandbox ends after its last slot, or this process, has ended.", ge=1
    )
    modal_max_lifetime: int = setting(
        3600,
        "Modal: maximum lifetime of a sandbox in seconds. Must be longer than a rollout; grows with worker_timeout "
        "unless it is set.",
        ge=1,
    )
    modal_acquire_timeout: float = setting(60, "Modal: seconds to wait for a slot and for capacity.", gt=0)
    modal_execution_timeout: float = setting(
        30, "Modal: time limit of a command in seconds; unless set, terminal_timeout applies.", gt=0
    )
    modal_secrets: str = setting("", "Modal: names of Modal secrets, separated by commas. All commands can read them.")
    modal_env_vars: str = setting("", "Modal: environment variables of all commands, as K=V;K=V.")


class NomadSettings(Settings):
    """Sandboxes in a job of Nomad."""

    nomad_address: str = setting("http://localhost:4646", "Nomad: the address of its API.")
    nomad_token: str | None = setting(
        None, "Nomad: an ACL token that may submit, scale, stop and read jobs, and read logs."
    )
    nomad_namespace: str | None = setting(None, "Nomad: the namespace of the job. Default: that of Nomad.")
    nomad_region: str | None = setting(None, "Nomad: the region of the job. Default: that of the agent.")
    nomad_ca_cert: str | None = host_path(None, "Nomad: the certificate of the authority of an agent with TLS.")
    nomad_client_cert: str | None = host_path(None, "Nomad: the certificate of this client, for an agent that asks.")
    nomad_client_key: str | None = host_path(None, "Nomad: the key of that certificate.")
    nomad_tls_server_name: str | None = setting(
        None, "Nomad: the name in the agent's certificate, if it is not that of the address."
    )
    nomad_datacenter: str = setting("dc1", "Nomad: the datacenter of the job.")
    nomad_cpu: int = setting(1000, "Nomad: CPU of one container in MHz, shared by all its slots.", ge=1)
    nomad_memory: int = setting(2048, "Nomad: memory of one container in megabytes, shared by all its slots.", ge=10)
    nomad_scale_cooldown: float = setting(60, "Nomad: seconds until an idle container is removed.", ge=0)
    sandbox_job_id: str = setting(
        "atropos-sandbox", "Nomad: the job's name. If another live run has this name, the run adds a suffix."
    )
    sandbox_image: str = setting(
        "atropos-sandbox:local", "Nomad: the image for tasks that name none; it needs Python 3.11."
    )
    min_containers: int = setting(1, "Nomad: containers to keep while idle.", ge=0)
    privileged: bool = setting(
        False, "Nomad: use privileged containers, for slots at `userns` or `full`, whichever the node allows."
    )
    purge_job_on_start: bool = setting(False, "Nomad: first remove a job with this name if no live run owns it.")
    purge_job_on_shutdown: bool = setting(True, "Nomad: remove the job from Nomad's list at the end.")
    driver: str = setting("docker", "Nomad: the task driver, `docker` or `raw_exec`.")
