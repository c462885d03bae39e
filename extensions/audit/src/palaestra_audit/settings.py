"""The settings of an audit as its file keeps them: without keys, which have to be given again to play a witness."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence

from palaestra.envs.config.command_line import flags_of
from palaestra.envs.config.fields import UNSAID
from palaestra.rollouts.journal.journal import without_secrets
from palaestra_slots.core.config import SHORT_FORMS, is_secret
from palaestra_slots.core.types import JSON


def kept_settings(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of a command line without its secret settings, and the flags of those. A setting is secret by
    the rule that the record of a run follows (`without_secrets`)."""
    kept: list[str] = []
    secret: list[str] = []
    for group in flags_of(words):
        flag, equals, value = group[0].partition("=")
        values = [value, *group[1:]] if equals else group[1:]
        if any(map(is_secret, _name(flag).split("."))) or any(map(_has_secret, values)):
            secret.append(flag)
        else:
            kept += group
    return kept, secret


def missing_settings(secret: Collection[str], given: Sequence[str], sources: Mapping[str, str]) -> list[str]:
    """Return the secret flags that are neither among the `given` words nor set in another way, as `sources` shows."""
    again = {group[0].partition("=")[0] for group in flags_of(given)}
    names = {flag: ".".join(_name(flag).split(".")[:2]) for flag in secret if flag not in again}
    return [flag for flag, name in names.items() if sources.get(name, UNSAID[0]) in UNSAID]


def _name(flag: str) -> str:
    return SHORT_FORMS.get(flag, flag.removeprefix("--")).replace("-", "_")


def _has_secret(word: str) -> bool:
    value: JSON = word
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(word)
    return any(without_secrets({"": each}) != {"": each} for each in (word, value))
