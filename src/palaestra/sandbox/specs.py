"""What a slot was made from, as JSON and back: a service keeps it beside each lease for whoever attaches next."""

from __future__ import annotations

from dataclasses import asdict

from palaestra.core.types import JSON, AllowList, Limits, Network
from palaestra.sandbox.base import Mount, SlotSpec


def encode(trajectory_id: str, spec: SlotSpec) -> dict[str, JSON]:
    """As plain JSON."""
    network = spec.network.value if isinstance(spec.network, Network) else list(spec.network.hosts)
    mounts = [[mount.source, mount.target] for mount in spec.mounts]
    about: dict[str, JSON] = {"trajectory_id": trajectory_id, "image": spec.image, "network": network}
    about["warm_shell"] = spec.warm_shell
    return about | {"limits": asdict(spec.limits), "mounts": mounts, "env": [list(pair) for pair in spec.env]}


def decode(about: dict[str, JSON]) -> tuple[str, SlotSpec]:
    """The inverse of `encode`."""
    network = about["network"]
    spec = SlotSpec(
        image=about["image"],
        network=Network(network) if isinstance(network, str) else AllowList(tuple(network)),
        limits=Limits(**about["limits"]),
        mounts=tuple(Mount(*mount) for mount in about["mounts"]),
        env=tuple((name, value) for name, value in about["env"]),
        warm_shell=about["warm_shell"],
    )
    return about["trajectory_id"], spec
