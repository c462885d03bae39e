"""Tool calls in raw model text: `get_parser(name).parse(text)`. One class per format, looked up by name."""

from palaestra_tokens.parsers.output_reader import GrammarParser
from palaestra_tokens.parsers.parser import (
    BrokenCall,
    BrokenReason,
    ParsedCall,
    ParsedOutput,
    ReasoningPiece,
    TextPiece,
    ToolCallParser,
    Unwritable,
)
from palaestra_tokens.parsers.registry import UnknownParser, get_parser, list_parsers, register_parser

__all__ = [
    "BrokenCall",
    "BrokenReason",
    "GrammarParser",
    "ParsedCall",
    "ParsedOutput",
    "ReasoningPiece",
    "TextPiece",
    "ToolCallParser",
    "UnknownParser",
    "Unwritable",
    "get_parser",
    "list_parsers",
    "register_parser",
]
