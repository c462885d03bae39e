"""Which flags of a command line are secret, for files that store the command line, such as those of an evaluation set
or an audit. Invariant: what the record of a run hides (`without_secrets`) is in no such file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence

from palaestra.envs.config.command_line import flags_of, setting_of
from palaestra.envs.config.fields import UNSAID
from palaestra.rollouts.journal.journal import without_secrets
from palaestra_slots.core.config import DEFAULT, SHORT_FORMS, is_secret
from palaestra_slots.core.types import JSON


def split_secrets(words: Sequence[str], hidden: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Return the words of a command line without its secret settings, and the flags of those. Settings in `hidden` are
    secret whatever their names and values."""
    kept: list[str] = []
    secret: list[str] = []
    for group in flags_of(words):
        flag, equals, value = group[0].partition("=")
        values = [value, *group[1:]] if equals else group[1:]
        if setting_of(flag) in hidden or any(map(is_secret, _flag_words(flag))) or any(map(has_secret, values)):
            secret.append(flag)
        else:
            kept += group
    return kept, secret


def missing_settings(secret: Collection[str], given: Sequence[str], sources: Mapping[str, str]) -> list[str]:
    """Return the secret flags, or settings such as `env.seed`, that are neither among the `given` words nor set in
    another way, as `sources` shows."""
    again = {group[0].partition("=")[0] for group in flags_of(given)}
    known = by_flag(sources)
    return [each for each in secret if each not in again and known.get(setting_of(each), DEFAULT) in UNSAID]


def by_flag(sources: Mapping[str, str]) -> dict[str, str]:
    """Return the sources of settings by the names that flags have: of several servers, those of the first one."""
    return {name.replace("openai[0].", "openai."): source for name, source in sources.items()}


def has_secret(word: str) -> bool:
    """Return whether a value, as text or as JSON, has a part that the record of a run hides."""
    value: JSON = word
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(word)
    return any(without_secrets({"": each}) != {"": each} for each in (word, value))


def _flag_words(flag: str) -> list[str]:
    return SHORT_FORMS.get(flag, flag.removeprefix("--")).replace("-", "_").split(".")
