"""Tool calls in raw model text: one file per format, looked up by name."""

from palaestra.inference.parsers.parser import (
    BrokenCall,
    Call,
    Event,
    Parsed,
    Parser,
    Piece,
    Reason,
    Reasoning,
    ReasoningDelta,
    StreamParser,
    TakenBack,
    Text,
    TextDelta,
    ToolCallParser,
    Tools,
    Unwritable,
)
from palaestra.inference.parsers.registry import UnknownParser, get_parser, list_parsers, register_parser

__all__ = [
    "BrokenCall",
    "Call",
    "Event",
    "Parsed",
    "Parser",
    "Piece",
    "Reason",
    "Reasoning",
    "ReasoningDelta",
    "StreamParser",
    "TakenBack",
    "Text",
    "TextDelta",
    "ToolCallParser",
    "Tools",
    "UnknownParser",
    "Unwritable",
    "get_parser",
    "list_parsers",
    "register_parser",
]
