"""The secret settings of an audit, which its file does not keep: they have to be given again to play a witness."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from palaestra.envs.config.command_line import flags_of, setting_of
from palaestra.envs.config.fields import UNSAID


def missing_settings(secret: Collection[str], given: Sequence[str], sources: Mapping[str, str]) -> list[str]:
    """Return the secret flags that are neither among the `given` words nor set in another way, as `sources` shows."""
    again = {group[0].partition("=")[0] for group in flags_of(given)}
    names = {flag: setting_of(flag) for flag in secret if flag not in again}
    return [flag for flag, name in names.items() if sources.get(name, UNSAID[0]) in UNSAID]
