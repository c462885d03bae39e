"""Qwen3-Coder: markup with one element per argument.

    <tool_call>
    <function=f>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

Source: the chat template of Qwen/Qwen3-Coder. One line end after a parameter's opening tag and one before its end tag
belong to the format, all other white space to the value. `<function=…>` may stand without the tags around it, as the
family's own parser allows; an opening tag that is there wants its end tag after the last
of its calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from palaestra.core.types import JSON
from palaestra.inference.parsers.parser import Call, Malformed, Reason, bare
from palaestra.inference.parsers.reader import Output, mentioned
from palaestra.inference.parsers.syntax.xml_calls import Element, Markup, ending, write_element
from palaestra.inference.parsers.text_source import Mark, Markers, Reading, Source


class Qwen3Coder(Markup):
    """One call per section; where several stand in one, each is a call."""

    section = ("<tool_call>", "</tool_call>")
    call = ("<function=", "</function>")
    parameter = ("<parameter=", "</parameter>")
    openers: ClassVar[Markers] = Markers("<tool_call>", "<function=")

    def read(self, output: Output, mark: Mark) -> Reading[int | None]:
        """One call, in a section or without."""
        source, begin = output.source, mark.start
        wants_end = mark.text == self.section[0] or output.in_section
        output.in_section = False
        if mark.text == self.section[0]:
            begin = yield from source.skip(mark.end)
            if not (yield from source.at(begin, self.call[0])):
                return (yield from mentioned(output, mark, self.section[1]))
        element = yield from self.element(output, begin)
        after = yield from source.skip(element.end)
        if (yield from source.at(after, self.section[1])):
            element = Element(element.name, element.arguments, after + len(self.section[1]), element.problem)
        elif wants_end and (yield from source.at(after, self.call[0])):
            output.in_section = True
        elif wants_end and element.problem is None:
            end, problem = yield from ending(source, element.end, self.section[1])
            element = Element(element.name, element.arguments, end, problem)
        write_element(output, element, mark.start)
        return element.end

    def named(self, head: str) -> str:
        """`f` of `<function=f>`."""
        if not head.strip():
            raise Malformed(Reason.NO_NAME, "the call has no name")
        return head.strip()

    def argument(self, output: Output, call: str, head: str, value: str) -> tuple[str, JSON]:
        """Typed by the tool's schema."""
        key = head.strip()
        value = value.removeprefix("\r\n") if value.startswith("\r\n") else value.removeprefix("\n")
        value = value.removesuffix("\r\n") if value.endswith("\r\n") else value.removesuffix("\n")
        return key, output.types.value(call, key, value)

    def _is_over(self, source: Source, after: int) -> Reading[bool]:
        """The section ends, another call begins, or the output ends."""
        over = yield from source.at(after, self.section[1])
        if not over and after >= source.end:
            over = yield from source.ends(after)
        return over

    def render(self, calls: Sequence[Call], text: str) -> str:
        """Every tag and value on a line of its own."""
        blocks = []
        for call in calls:
            values = "".join(f"<parameter={key}>\n{bare(v)}\n</parameter>\n" for key, v in call.arguments.items())
            blocks.append(f"<tool_call>\n<function={call.name}>\n{values}</function>\n</tool_call>")
        return "\n".join([text, *blocks] if text else blocks)
