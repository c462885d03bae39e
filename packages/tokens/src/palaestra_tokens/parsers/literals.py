"""Reads Python literals, which models write where JSON is meant, without evaluating them."""

from __future__ import annotations

import ast
import math
import warnings

from palaestra_slots.core.types import JSON
from palaestra_tokens.parsers.parser import BrokenReason, Malformed


def literal(text: str) -> JSON:
    """Return the value of a Python literal that JSON can express, without evaluating it. Raises `Malformed`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about unknown escapes
            # In parentheses, a literal may begin with white space and extend over lines, as JSON may.
            return _json_value(ast.parse(f"({text})", mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise Malformed(BrokenReason.MALFORMED_MARKUP, f"not a literal: {error}"[:200]) from None


def _json_value(node: ast.expr | None) -> JSON:
    match node:
        case ast.Constant(value=float() as value) if math.isinf(value):
            raise Malformed(BrokenReason.NOT_FINITE, "a number is too large")
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant(value=int() | float() as value)) if (
            # Python evaluates -True to -1; JSON has no such value.
            type(value) is not bool
        ):
            return -_json_value(node.operand) if isinstance(node.op, ast.USub) else value
        case ast.List(elts=elements):
            return [_json_value(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            names = [_json_value(key) for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise Malformed(BrokenReason.MALFORMED_MARKUP, "a key is not a string")
            if len(set(names)) < len(names):
                raise Malformed(BrokenReason.DUPLICATE_KEY, "a key is a duplicate")
            return dict(zip(names, map(_json_value, values), strict=True))
    raise Malformed(BrokenReason.MALFORMED_MARKUP, f"{type(node).__name__} is not a literal that JSON can express")
