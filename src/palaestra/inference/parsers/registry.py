"""Parsers by name, loaded when first asked for.

For `--env.tool_call_parser NAME` and for scripts that bring a parser of their own. Invariant: asking for a name that is
not there names the nearest one; nothing falls back to another format in silence.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib import import_module
from typing import TypeVar, cast

from palaestra.core.errors import ConfigError
from palaestra.inference.parsers.parser import Parser, ToolCallParser
from palaestra.inference.parsers.reader import Grammar, GrammarParser

_GRAMMARS = {
    "deepseek_v3": "deepseek:DeepSeekV3",
    "deepseek_v3_1": "deepseek:DeepSeekV31",
    "deepseek_v3_2": "deepseek_dsml:DeepSeekV32",
    "deepseek_v4": "deepseek_dsml:DeepSeekV4",
    "glm45": "glm:Glm45",
    "glm47": "glm:Glm47",
    "gpt_oss": "gpt_oss:GptOss",
    "granite": "granite:Granite",
    "hermes": "hermes:Hermes",
    "kimi_k2": "kimi_k2:KimiK2",
    "llama3_json": "llama_json:LlamaJson",
    "llama4_json": "llama_json:LlamaJson",
    "llama4_pythonic": "llama4_pythonic:Llama4Pythonic",
    "longcat": "hermes:LongCat",
    "minimax_m2": "minimax_m2:MiniMaxM2",
    "mistral": "mistral:Mistral",
    "qwen": "hermes:Hermes",
    "qwen3_coder": "qwen3_coder:Qwen3Coder",
}
_ALIASES = {"deepseek_v31": "deepseek_v3_1", "deepseek_v32": "deepseek_v3_2", "granite4": "hermes"}

Registered = TypeVar("Registered", bound=Callable[[], ToolCallParser])

_registered: dict[str, Callable[[], ToolCallParser]] = {}


class UnknownParser(ConfigError, KeyError):
    """No parser has this name. Also a `KeyError`, which the contract's scripts catch."""

    def __str__(self) -> str:
        return str(self.args[0])


def get_parser(name: str) -> Parser:
    """The parser of a format. Raises `UnknownParser`.

    One that a script registered is returned as it is: it need have no more than the contract's `parse(text)`.
    """
    if name in _registered:
        return cast("Parser", _registered[name]())
    place = _GRAMMARS.get(_ALIASES.get(name, name))
    if place is None:
        near = difflib.get_close_matches(name, list_parsers(), 1)
        hint = f"; did you mean '{near[0]}'?" if near else "."
        raise UnknownParser(f"No tool-call parser is named '{name}'{hint} There are: {', '.join(list_parsers())}")
    module, _, grammar = place.partition(":")
    found: type[Grammar] = getattr(import_module(f"palaestra.inference.parsers.formats.{module}"), grammar)
    return GrammarParser(name, found())


def list_parsers() -> list[str]:
    """All names, aliases and registered ones too, sorted."""
    return sorted({*_GRAMMARS, *_ALIASES, *_registered})


def register_parser(name: str) -> Callable[[Registered], Registered]:
    """Class decorator: `get_parser(name)` makes one of these, from now on, whatever had the name before."""

    def register(made_by: Registered) -> Registered:
        _registered[name] = made_by
        return made_by

    return register
