"""Reports the containers and sandboxes that the slots of a run have used, and their cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from palaestra_slots.core.types import JSON


def slot_usage(stats: Mapping[str, JSON], prices: Mapping[str, float]) -> dict[str, float]:
    """Return metrics of a run, computed from its backend's statistics. For each backend with containers,
    `slots/NAME/hours` is the containers' total running time in hours, `slots/NAME/begun` is the number of containers,
    and `slots/NAME/cost` is their cost, if `prices` has the backend's price per hour. `slots/cost` is the sum of the
    costs."""
    found: dict[str, float] = {}
    costs = []
    for each in _backends(stats):
        name, hours = each["backend"], float(each["container_s"]) / 3600
        found[f"slots/{name}/hours"] = round(found.get(f"slots/{name}/hours", 0.0) + hours, 6)
        found[f"slots/{name}/begun"] = found.get(f"slots/{name}/begun", 0.0) + int(each["containers_begun"])
        if name in prices:
            costs.append(hours * prices[name])
            found[f"slots/{name}/cost"] = round(found.get(f"slots/{name}/cost", 0.0) + costs[-1], 6)
    return found | ({"slots/cost": round(sum(costs), 6)} if costs else {})


def _backends(stats: Mapping[str, JSON]) -> Iterator[Mapping[str, JSON]]:
    if "container_s" in stats:
        yield stats
    for each in stats.get("backends", ()):
        yield from _backends(each)
