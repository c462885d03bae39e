"""Finds parsers by name and loads them on first use; scripts can register their own. For an unknown name, the error
suggests the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib import import_module
from typing import TypeVar, cast

from palaestra_slots.core.errors import ConfigError
from palaestra_tokens.parsers.output_reader import Grammar, GrammarParser
from palaestra_tokens.parsers.parser import ToolCallParser

_GRAMMARS = {
    "deepseek_v3": "sections:DeepSeekV3",
    "deepseek_v3_1": "sections:DeepSeekV31",
    "deepseek_v3_2": "markup:DeepSeekV32",
    "deepseek_v4": "markup:DeepSeekV4",
    "glm45": "markup:Glm45",
    "glm47": "markup:Glm47",
    "gpt_oss": "gpt_oss:GptOss",
    "granite": "mistral_granite:Granite",
    "hermes": "json_calls:Hermes",
    "kimi_k2": "sections:KimiK2",
    "llama3_json": "llama:LlamaJson",
    "llama4_json": "llama:LlamaJson",
    "llama4_pythonic": "llama:Llama4Pythonic",
    "longcat": "json_calls:LongCat",
    "minimax_m2": "markup:MiniMaxM2",
    "mistral": "mistral_granite:Mistral",
    "qwen": "json_calls:Hermes",
    "qwen3_coder": "markup:Qwen3Coder",
}
_ALIASES = {"deepseek_v31": "deepseek_v3_1", "deepseek_v32": "deepseek_v3_2", "granite4": "hermes"}

Registered = TypeVar("Registered", bound=Callable[[], ToolCallParser])

_registered: dict[str, Callable[[], ToolCallParser]] = {}


class UnknownParser(ConfigError, KeyError):
    """Raised if no parser has this name. It is also a `KeyError`, which existing scripts catch."""

    def __str__(self) -> str:
        return str(self.args[0])


def get_parser(name: str) -> GrammarParser:
    """Return the parser of a format. Raises `UnknownParser`. A registered parser may support only `parse(text)`,
    without further arguments."""
    if name in _registered:
        return cast("GrammarParser", _registered[name]())
    location = _GRAMMARS.get(_ALIASES.get(name, name))
    if location is None:
        near = difflib.get_close_matches(name, list_parsers(), 1)
        hint = f"; did you mean '{near[0]}'?" if near else "."
        raise UnknownParser(f"No tool-call parser is named '{name}'{hint} Available: {', '.join(list_parsers())}")
    module, _, grammar = location.partition(":")
    found: type[Grammar] = getattr(import_module(f"palaestra_tokens.parsers.formats.{module}"), grammar)
    return GrammarParser(name, found())


def list_parsers() -> list[str]:
    """Return the names of all parsers, sorted, including aliases and registered parsers."""
    return sorted({*_GRAMMARS, *_ALIASES, *_registered})


def register_parser(name: str) -> Callable[[Registered], Registered]:
    """Return a class decorator: from then on, `get_parser(name)` returns an instance of the class, even if the name
    already had a parser."""

    def decorate(made_by: Registered) -> Registered:
        _registered[name] = made_by
        return made_by

    return decorate
