"""The Weights & Biases client of the worker process: metrics as a run's history, rollouts as a table.

Its files are in the run's folder, under `wandb/`; `wandb sync` uploads offline runs. Invariant: the client never
prompts for a key. Without a stored key, it writes offline unless a mode is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import wandb

OFFLINE = "offline"

SETTINGS: dict[str, Any] = {
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "x_save_requirements": False,
    "x_disable_stats": True,
}
"""Only metrics are sent: no terminal output, code, packages or system load."""


class WandbClient:
    """One run of the service; a resumed run continues it."""

    def __init__(self, label: Mapping[str, Any]) -> None:
        mode = label["mode"]
        if mode is None and not _key_is_stored():
            mode = OFFLINE
        self._run = wandb.init(
            project=label["project"],
            name=label["name"],
            group=label["group"],
            id=label["run_id"],
            resume="allow",
            dir=label["folder"],
            config=dict(label["settings"]),
            mode=mode,
            settings=wandb.Settings(**SETTINGS),
        )

    def log(self, step: int, numbers: Mapping[str, float | str]) -> None:
        """Add metrics to the history."""
        self._run.log(dict(numbers), step=step)

    def show(self, step: int, name: str, rows: list[tuple[str, float]]) -> None:
        """Show a table of texts and scores."""
        self._run.log({name: wandb.Table(columns=["text", "score"], data=[list(row) for row in rows])}, step=step)

    def finish(self) -> None:
        """Send the remaining data."""
        self._run.finish()


def _key_is_stored() -> bool:
    try:
        # `verify` would ask the service, and an offline machine would wait for it.
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # releases without `prompt`
        return bool(wandb.api.api_key)
