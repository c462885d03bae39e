"""The texts of tokens, from the tokenizer of a run.

A run's folder may come from another person, so its settings choose a tokenizer only if this user made the run on this
machine, and only a folder is read: nothing is downloaded that the user did not name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from palaestra.rollouts.journal.origin import made_here
from palaestra_slots.core.config import local_path
from palaestra_slots.core.errors import ConfigError
from palaestra_view.rollout_record import Names
from palaestra_view.runs import OpenRuns

if TYPE_CHECKING:
    from palaestra_tokens.tokenizers import FastTokenizer


class TokenTexts:
    """Finds the tokenizer of each run, once. `chosen` is the tokenizer that the user named, for all runs. Raises
    `ConfigError` if that tokenizer cannot be loaded."""

    def __init__(self, runs: OpenRuns, chosen: str | None = None) -> None:
        self._runs = runs
        self._found: dict[str, FastTokenizer | None] = {}
        self._chosen = None if chosen is None else _load_tokenizer(chosen)

    def __call__(self, run: str) -> Names | None:
        """Return the function that gives the texts of a run's tokens, or None if no tokenizer is known."""
        tokenizer = self._chosen
        if tokenizer is None:
            if run not in self._found:
                self._found[run] = self._tokenizer_of(run)
            tokenizer = self._found[run]
        return None if tokenizer is None else _Texts(tokenizer)

    def _tokenizer_of(self, run: str) -> FastTokenizer | None:
        index = self._runs[run]
        config = index.config()
        env, server = config.get("env") or {}, (config.get("openai") or [{}])[0]
        names = (server.get("tokenizer_name"), env.get("tokenizer_name"), server.get("model_name"))
        named = next((each for each in names if isinstance(each, str) and each not in ("", "none", "default")), None)
        if named is None or not made_here(index.folder, config):
            return None
        try:
            path = local_path(named)
            folder = path if path.is_absolute() else Path(str(config.get("folder", "."))) / path
            return _load_tokenizer(str(folder)) if folder.is_dir() else None
        except ConfigError:
            return None


class _Texts:
    """The texts of tokens, each decoded alone. Bytes that are not a whole character show as U+FFFD."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.decode([each], skip_special_tokens=False) for each in ids]


def _load_tokenizer(name: str) -> FastTokenizer:
    from palaestra_tokens.tokenizers import load_tokenizer  # imported here, because it needs the extra `tokens`

    return load_tokenizer(name)
