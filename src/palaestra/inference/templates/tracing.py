"""Renders a chat template with blanks in it, so that nothing is done with one unseen.

Not for prompts: what comes out is a measure. Jinja has ways to work on texts that go past their methods: writing them
together, `in`, filters, calls. Invariant: each of them either knows blanks, or raises `Opaque` where one is involved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context, Macro

from palaestra.core.types import JSON
from palaestra.inference.templates.blanks import Blank, Opaque
from palaestra.inference.templates.jinja import ChatTemplate, Sandbox, tojson
from palaestra.inference.templates.probe import NONCE

_PASSING = frozenset({"trim", "string", "length", "count", "default", "d", "upper", "lower"})
"""Filters that do nothing with a text but ask its methods, or hand it on."""


class _Generator(CodeGenerator):
    """Compiles `~` and `in` to calls of the environment's own."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja's name
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802 - jinja's name
        if len(node.ops) != 1 or node.ops[0].op not in ("in", "notin"):
            super().visit_Compare(node, frame)
            return
        self.write("(not " if node.ops[0].op == "notin" else "(")
        self.write("environment.holds(")
        self.visit(node.ops[0].expr, frame)
        self.write(", ")
        self.visit(node.expr, frame)
        self.write("))")


class _Tracing(Sandbox):
    """The sandbox of chat templates, for values with blanks in them."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"%", "*"})

    def __init__(self) -> None:
        super().__init__()
        self.filters = {name: _watched(name, function) for name, function in self.filters.items()}
        self.filters["tojson"] = _tojson
        self.tests = {**self.tests, "iterable": _or_text(self.tests["iterable"])}
        self.tests["sequence"] = _or_text(self.tests["sequence"])

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Texts written together; also what a template, a macro or a block gives."""
        found = list(parts)
        blank = next((part for part in found if isinstance(part, Blank)), None)
        return "".join(found) if blank is None else blank.recording.joined(found)

    def holds(self, container: JSON, member: JSON) -> bool:
        """`member in container`."""
        if isinstance(member, Blank) and isinstance(container, str):
            raise Opaque("in")
        return member in container

    def call(self, context: Context, function: Callable[..., JSON], *given: JSON, **named: JSON) -> JSON:
        """A call in the template. Only its own macros, and `namespace`, know what to do with a blank."""
        taken = isinstance(function, Macro) or function is self.globals["namespace"]
        if not taken and any(isinstance(value, Blank) for value in (*given, *named.values())):
            raise Opaque("a call with a text")
        return super().call(context, function, *given, **named)

    def call_binop(self, context: Context, operator: str, left: JSON, right: JSON) -> JSON:
        """`%`, which formats, and `*`."""
        if isinstance(left, str) or isinstance(right, Blank):
            raise Opaque(operator)
        return super().call_binop(context, operator, left, right)


def traced(template: ChatTemplate) -> ChatTemplate:
    """The same template, rendered with blanks in mind."""
    return template.compiled_in(_Tracing())


def _watched(name: str, function: Callable[..., JSON]) -> Callable[..., JSON]:
    """A filter that raises `Opaque` when it is given a blank, or would write texts together."""
    if name in _PASSING:
        return function

    @functools.wraps(function)  # jinja keeps notes on functions as attributes
    def watched(*given: JSON, **named: JSON) -> JSON:
        if any(isinstance(value, Blank) for value in (*given, *named.values())):
            raise Opaque(name)
        answer = function(*given, **named)
        if isinstance(answer, str) and not isinstance(answer, Blank) and f"B{NONCE}" in answer:
            raise Opaque(name)
        return answer

    return watched


def _tojson(value: JSON, **options: JSON) -> JSON:
    if isinstance(value, Blank) and not options:
        return value.recording.applied(tojson, value, ())
    text = tojson(value, **options)
    if f"B{NONCE}" in text:
        raise Opaque("tojson")
    return text


def _or_text(test: JSON) -> Callable[[JSON], JSON]:
    return lambda value: True if isinstance(value, Blank) else test(value)
