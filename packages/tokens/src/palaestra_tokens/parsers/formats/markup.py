"""Calls as markup with one element per argument: Qwen3-Coder, MiniMax M2, DeepSeek V3.2 and V4, and GLM 4.5 to 4.7.

    Qwen      <tool_call>                          MiniMax   <minimax:tool_call>
              <function=f>                                   <invoke name="f">
              <parameter=key>                                <parameter name="key">value</parameter>
              value                                          </invoke>
              </parameter>                                   </minimax:tool_call>
              </function>
              </tool_call>
    DeepSeek  <｜DSML｜function_calls>
              <｜DSML｜invoke name="f">
              <｜DSML｜parameter name="key" string="true">value</｜DSML｜parameter>
              </｜DSML｜invoke>
              </｜DSML｜function_calls>
    GLM       <tool_call>f<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>
              (4.5 has every tag on a line of its own; line ends between tags do not matter)

Sources: the chat templates of Qwen/Qwen3-Coder, zai-org/GLM-4.5 and GLM-4.7; the chat template and the tool-calling
guide of MiniMaxAI/MiniMax-M2; the encoding published with deepseek-ai/DeepSeek-V3.2, in which V4 renames the section's
tag to `tool_calls`.

Values are bare text without quoting, so a value ends at the first end tag after which the markup continues: an end tag
inside code stays in the value. Invariants: a value that was never closed breaks its call and never absorbs the next
argument or call; the next call then begins after the first end tag that could have closed the value; a broken call ends
after the place where it broke, so reading always makes progress.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from palaestra_slots.core.types import JSON
from palaestra_tokens.parsers.formats.json_calls import CUT_OFF, cut_off
from palaestra_tokens.parsers.output_reader import FoundCall, Grammar, OutputReader
from palaestra_tokens.parsers.parser import BrokenReason, Malformed, ParsedCall, bare
from palaestra_tokens.parsers.scan import (
    Mark,
    breaks_off,
    closing,
    decode_object,
    find,
    parse_json,
    scan_value,
    skip,
)


class Markup(Grammar):
    """The tags of one family. `call` and `parameter` hold only the beginning of the opening tag, up to the name that it
    contains."""

    section: ClassVar[tuple[str, str]]
    call: ClassVar[tuple[str, str]]
    parameter: ClassVar[tuple[str, str]]

    @abstractmethod
    def named(self, head: str) -> str:
        """Return the name in the rest of an opening tag, up to `>`. Raises `Malformed`."""

    @abstractmethod
    def argument(self, output: OutputReader, call: str, head: str, value: str) -> tuple[str, JSON]:
        """Return the key and value of an argument. Raises `Malformed`."""

    def read(self, output: OutputReader, mark: Mark) -> int | None:
        begin = mark.start
        if mark.text == self.section[1]:
            return output.leave_section(mark)
        if mark.text == self.section[0]:
            begin = skip(output.text, mark.end)
            if not output.text.startswith(self.call[0], begin):
                return output.mentioned(mark, self.section[1])
            output.skip_to(begin)
            output.in_section = True
        return output.add(self.element(output, begin), begin) if output.in_section else None

    def in_one_section(self, text: str, lines: list[str]) -> str:
        """Return `text`, followed by the lines of the calls, enclosed in the section's tags. Without calls, return only
        `text`."""
        return "\n".join([*([text] if text else []), self.section[0], *lines, self.section[1]]) if lines else text

    def element(self, output: OutputReader, start: int) -> FoundCall:
        name, arguments = "", dict[str, JSON]()
        position, closes_itself = start + len(self.call[0]), False
        try:
            head, position = _rest_of_tag(output.text, position)
            closes_itself = head.endswith("/")
            name = self.named(head.removesuffix("/").rstrip())
            if not closes_itself:
                position = self._arguments(output, name, position, arguments)
            return FoundCall(name, arguments, position)
        except Malformed as problem:
            # A call that closes itself has no end tag, so the next one belongs to another call.
            if not closes_itself:
                begins = (self.section[1], self.call[0])
                position = end_of_broken(output.text, max(position, problem.at), self.call[1], *begins)
            return FoundCall(name, {}, position, problem)

    def _arguments(self, output: OutputReader, name: str, start: int, arguments: dict[str, JSON]) -> int:
        text = output.text
        position = skip(text, start)
        if text.startswith("{", position):
            position = self._object(text, position, arguments)
        while not text.startswith(self.call[1], position):
            if not text.startswith(self.parameter[0], position):
                if breaks_off(text, position, self.parameter[0], self.call[1]):
                    raise Malformed(BrokenReason.UNCLOSED, CUT_OFF, position)
                detail = f"{self.parameter[0]!r} or {self.call[1]!r} is missing"
                raise Malformed(BrokenReason.MALFORMED_MARKUP, detail, position)
            head, begin = _rest_of_tag(text, position + len(self.parameter[0]))
            end, position = self._value_end(output, begin)
            try:
                key, value = self.argument(output, name, head, text[begin:end])
            except Malformed as problem:
                # The value has been read to its end, so the broken call ends after it and not inside it.
                problem.at = position
                raise
            if key in arguments:
                raise Malformed(BrokenReason.DUPLICATE_KEY, f"the argument {key!r} is a duplicate", position)
            arguments[key] = value
        return position + len(self.call[1])

    def _object(self, text: str, start: int, arguments: dict[str, JSON]) -> int:
        """Read all arguments as one JSON object; return where the markup continues."""
        scan = scan_value(text, start)
        try:
            # With the character at which the scan stopped, so that the decoder meets it and names the problem.
            arguments.update(decode_object(text[start : scan.end + (not scan.complete)]))
        except Malformed as problem:
            problem.at = scan.end
            raise
        if not scan.complete:
            raise Malformed(BrokenReason.UNCLOSED, "the JSON does not end", scan.end)
        return skip(text, scan.end)

    def _value_end(self, output: OutputReader, start: int) -> tuple[int, int]:
        """Return where the value that begins at `start` ends, and where the markup continues. Raises `Malformed`.

        `meant` is the likely end of an unclosed value: an end tag before another call or the section's end. If more
        markup comes before an end tag that fits, the value is unclosed, and the error has that position.
        """
        text, position, meant = output.text, start, -1
        while (mark := find(text, position, self.parameter[1], self.parameter[0], self.call[1])) is not None:
            after = skip(text, mark.end)
            if mark.text == self.parameter[1]:
                # A value may itself contain an end tag, as text. It ends the value only if the next markup follows it.
                if text.startswith((self.parameter[0], self.call[1]), after):
                    return mark.start, after
            elif meant >= 0 or self._is_over(text, mark, after):
                raise Malformed(BrokenReason.UNCLOSED, "an argument is not closed", meant if meant >= 0 else mark.start)
            if meant < 0 and text.startswith((self.section[1], self.call[0]), after):
                meant = after if mark.text == self.parameter[1] else mark.start
            position = mark.end
        detail = CUT_OFF if output.cut else "an argument is not closed"
        raise Malformed(BrokenReason.UNCLOSED, detail, output.end if output.cut or meant < 0 else meant)

    def _is_over(self, text: str, mark: Mark, after: int) -> bool:
        """Return whether a parameter's opening tag or a call's end tag is certainly not part of a value."""
        # Templates begin a line with each parameter; the same tag inside a line may be part of a value.
        if mark.text == self.parameter[0]:
            return text[mark.start - 1] == "\n"
        return text.startswith(self.section[1], after)


def end_of_broken(text: str, broken: int, close: str, *begins: str) -> int:
    """Return the position after the first `close` that follows `broken`, or `broken` itself if one of `begins` is
    there. If no `close` follows, return the end of the text."""
    if text.startswith(begins, broken):
        return broken
    found = find(text, broken, close)
    return len(text) if found is None else found.end


def _rest_of_tag(text: str, start: int) -> tuple[str, int]:
    """Return the rest of an opening tag and where the tag ends. Raises `Malformed`."""
    mark = find(text, start, ">", "<", "\n")
    if mark is None:
        raise Malformed(BrokenReason.UNCLOSED, "a tag is not closed", len(text))
    if mark.text != ">":
        raise Malformed(BrokenReason.MALFORMED_MARKUP, "a tag is not closed", mark.start)
    return text[start : mark.start], mark.end


_NAME = re.compile(r'\s+name="([^"]+)"\s*')


def name_attribute(head: str) -> str:
    """Return the name if the rest of an opening tag is `name="…"` and nothing else. Raises `Malformed`."""
    found = _NAME.fullmatch(head)
    if found is None:
        raise Malformed(BrokenReason.NO_NAME, "a name is missing or not quoted")
    return found[1]


class Qwen3Coder(Markup):
    """The format has one call per section; if a model writes several, each counts as a call.

    One line end after a parameter's opening tag and one before its end tag belong to the format, all other white space
    to the value. `<function=…>` may appear without the section's tags. If the section's opening tag is there, its end
    tag must follow the last call.
    """

    section = ("<tool_call>", "</tool_call>")
    call = ("<function=", "</function>")
    parameter = ("<parameter=", "</parameter>")
    openers = ("<tool_call>", "<function=")

    def read(self, output: OutputReader, mark: Mark) -> int | None:
        text, begin = output.text, mark.start
        wants_end = mark.text == self.section[0] or output.in_section
        output.in_section = False
        if mark.text == self.section[0]:
            begin = skip(text, mark.end)
            if not text.startswith(self.call[0], begin):
                return output.mentioned(mark, self.section[1])
        found = self.element(output, begin)
        after = skip(text, found.end)
        if text.startswith(self.section[1], after):
            found = found._replace(end=after + len(self.section[1]))
        # The next call is in the same section, whose end is then expected after that call.
        elif wants_end and text.startswith(self.call[0], after):
            output.in_section = True
        elif wants_end and found.problem is None:
            ending = closing(text, found.end, self.section[1])
            problem = cut_off(output, ending)
            if ending.how == "else":
                problem = Malformed(BrokenReason.UNCLOSED, f"{self.section[1]!r} does not follow the call")
            found = found._replace(end=ending.end, problem=problem)
        return output.add(found, mark.start)

    def named(self, head: str) -> str:
        if not head.strip():
            raise Malformed(BrokenReason.NO_NAME, "the call has no name")
        return head.strip()

    def argument(self, output: OutputReader, call: str, head: str, value: str) -> tuple[str, JSON]:
        key = head.strip()
        value = value.removeprefix("\r\n") if value.startswith("\r\n") else value.removeprefix("\n")
        value = value.removesuffix("\r\n") if value.endswith("\r\n") else value.removesuffix("\n")
        return key, output.types.value(call, key, value)

    def _is_over(self, text: str, mark: Mark, after: int) -> bool:
        return super()._is_over(text, mark, after) or (mark.text == self.call[1] and after >= len(text))

    def render(self, calls: Sequence[ParsedCall], text: str) -> str:
        blocks = []
        for call in calls:
            values = "".join(f"<parameter={key}>\n{bare(v)}\n</parameter>\n" for key, v in call.arguments.items())
            blocks.append(f"<tool_call>\n<function={call.name}>\n{values}</function>\n</tool_call>")
        return "\n".join([text, *blocks] if text else blocks)


class MiniMaxM2(Markup):
    """A section may hold several calls. White space belongs to the value."""

    section = ("<minimax:tool_call>", "</minimax:tool_call>")
    call = ("<invoke", "</invoke>")
    parameter = ('<parameter name="', "</parameter>")
    openers = (*section, "<invoke")

    def named(self, head: str) -> str:
        return name_attribute(head)

    def argument(self, output: OutputReader, call: str, head: str, value: str) -> tuple[str, JSON]:
        key, quote, rest = head.partition('"')
        if not quote or rest.strip() or not key:
            raise Malformed(BrokenReason.NO_NAME, "a name is missing or not quoted")
        return key, output.types.value(call, key, value)

    def render(self, calls: Sequence[ParsedCall], text: str) -> str:
        lines = []
        for call in calls:
            lines.append(f'<invoke name="{call.name}">')
            lines += [f'<parameter name="{key}">{bare(value)}</parameter>' for key, value in call.arguments.items()]
            lines.append("</invoke>")
        return self.in_one_section(text, lines)


_PARAMETER = re.compile(r'([^"]+)"(?:\s+string="(true|false)")?\s*')


class DeepSeekV32(Markup):
    """A section may hold several calls. White space belongs to the value.

    A value with `string="true"` is text, whatever the schema says; a value with `string="false"` is JSON. Without the
    attribute, the schema decides; any other value of the attribute makes the call malformed. An `invoke` element may be
    self-closing, or hold one JSON object instead of parameters.
    """

    section = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
    call = ("<｜DSML｜invoke", "</｜DSML｜invoke>")
    parameter = ('<｜DSML｜parameter name="', "</｜DSML｜parameter>")
    openers = (*section, "<｜DSML｜invoke")

    def named(self, head: str) -> str:
        return name_attribute(head)

    def argument(self, output: OutputReader, call: str, head: str, value: str) -> tuple[str, JSON]:
        found = _PARAMETER.fullmatch(head)
        if found is None:
            raise Malformed(BrokenReason.MALFORMED_MARKUP, "a parameter's tag is malformed")
        key, is_text = found[1], found[2]
        if is_text is None:
            return key, output.types.value(call, key, value)
        return key, value if is_text == "true" else parse_json(value)

    def render(self, calls: Sequence[ParsedCall], text: str) -> str:
        lines = []
        for call in calls:
            lines.append(f'{self.call[0]} name="{call.name}">')
            for key, value in call.arguments.items():
                is_text = "true" if isinstance(value, str) else "false"
                lines.append(f'{self.parameter[0]}{key}" string="{is_text}">{bare(value)}{self.parameter[1]}')
            lines.append(self.call[1])
        return self.in_one_section(text, lines)


class DeepSeekV4(DeepSeekV32):
    """The format of DeepSeek V3.2 with a different section tag."""

    section = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")
    openers = (*section, "<｜DSML｜invoke")


_GLM_OPEN, _GLM_CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_GLM_NAME = re.compile(r"[^\s<>{}\[\]()\"',;]+")


class Glm47(Grammar):
    """GLM 4.7 writes no line ends between the tags."""

    openers = (_GLM_OPEN,)
    newline: ClassVar[str] = ""

    def read(self, output: OutputReader, mark: Mark) -> int | None:
        """Read one call. A tag that neither a pair nor an end tag follows is only a mention."""
        found = find(output.text, mark.end, _KEY, _GLM_CLOSE, _GLM_OPEN)
        if found is None or found.text == _GLM_OPEN:
            return self._unfinished(output, mark, output.end if found is None else found.start)
        name = output.text[mark.end : found.start].strip()
        try:
            if _GLM_NAME.fullmatch(name) is None:
                raise Malformed(BrokenReason.NO_NAME, "the call does not begin with a name", found.start)
            call = FoundCall(name, *self._pairs(output, name, found.start))
        except Malformed as problem:
            name = name if _GLM_NAME.fullmatch(name) else ""
            call = FoundCall(name, {}, end_of_broken(output.text, problem.at, _GLM_CLOSE, _GLM_OPEN), problem)
        return output.add(call, mark.start)

    def _unfinished(self, output: OutputReader, mark: Mark, end: int) -> int | None:
        """Read a tag at the end of an output as an unfinished call if nothing follows it or, in a cut output, only a
        name. Otherwise, the tag is a mention."""
        name = output.text[mark.end : end].strip()
        if end < output.end or (name and not (output.cut and _GLM_NAME.fullmatch(name))):
            return None
        problem = Malformed(BrokenReason.UNCLOSED, "the output ends where a call begins")
        output.broken(problem, name, mark.start, end)
        return end

    def _pairs(self, output: OutputReader, name: str, start: int) -> tuple[dict[str, JSON], int]:
        text, position = output.text, start
        arguments: dict[str, JSON] = {}
        while not text.startswith(_GLM_CLOSE, position):
            if not text.startswith(_KEY, position):
                # The stop token of some servers ends the reply inside of the closing tag, which then lacks nothing but
                # its end.
                if not output.cut and breaks_off(text, position, _GLM_CLOSE):
                    return arguments, output.end
                if breaks_off(text, position, _KEY, _GLM_CLOSE):
                    raise Malformed(BrokenReason.UNCLOSED, CUT_OFF, position)
                raise Malformed(BrokenReason.MALFORMED_MARKUP, "a pair is missing", position)
            key_start = position + len(_KEY)
            key_end = find(text, key_start, _KEY_END, _GLM_CLOSE, _KEY, _VALUE)
            if key_end is None or key_end.text != _KEY_END:
                at = output.end if key_end is None else key_end.start
                raise Malformed(BrokenReason.UNCLOSED, "a key is not closed", at)
            key, begin = text[key_start : key_end.start].strip(), skip(text, key_end.end)
            if not text.startswith(_VALUE, begin):
                ended = breaks_off(text, begin, _VALUE)
                reason = BrokenReason.UNCLOSED if ended else BrokenReason.MALFORMED_MARKUP
                raise Malformed(reason, "a key has no value", begin)
            begin += len(_VALUE)
            end, position = self._value_end(output, begin)
            if key in arguments:
                raise Malformed(BrokenReason.DUPLICATE_KEY, f"the argument {key!r} is a duplicate", position)
            arguments[key] = output.types.value(name, key, text[begin:end])
        return arguments, position + len(_GLM_CLOSE)

    def _value_end(self, output: OutputReader, start: int) -> tuple[int, int]:
        """Return where a value ends, and where the pairs continue. An end tag with nothing valid after it is part of
        the value.

        `meant` is the likely end of an unclosed value: an end tag that is followed by another call or by the end of the
        output. Raises `Malformed`.
        """
        text, position, meant = output.text, start, -1
        # The end of a key before a value begins the next pair: then this value was not closed, whatever tags it
        # contains.
        tags = (_VALUE_END, _GLM_CLOSE, f"{_KEY_END}{_VALUE}", f"{_KEY_END}\n{_VALUE}")
        while (mark := find(text, position, *tags)) is not None:
            if mark.text not in (_VALUE_END, _GLM_CLOSE) or (meant >= 0 and mark.text == _GLM_CLOSE):
                raise Malformed(BrokenReason.UNCLOSED, "a value is not closed", start if meant < 0 else meant)
            after = skip(text, mark.end)
            ends = text.startswith((_KEY, _GLM_CLOSE), after) or breaks_off(text, after, _KEY, _GLM_CLOSE)
            if ends and mark.text == _VALUE_END:
                return mark.start, after
            if meant < 0 and (text.startswith(_GLM_OPEN, after) or after >= output.end):
                meant = after if mark.text == _VALUE_END else mark.start
            position = mark.end
        if output.cut:
            raise Malformed(BrokenReason.UNCLOSED, CUT_OFF, output.end)
        raise Malformed(BrokenReason.UNCLOSED, "a value is not closed", output.end if meant < 0 else meant)

    def render(self, calls: Sequence[ParsedCall], text: str) -> str:
        line = self.newline
        blocks = []
        for call in calls:
            pairs = "".join(
                f"{_KEY}{key}{_KEY_END}{line}{_VALUE}{bare(value)}{_VALUE_END}{line}"
                for key, value in call.arguments.items()
            )
            blocks.append(f"{_GLM_OPEN}{call.name}{line}{pairs}{_GLM_CLOSE}")
        return line.join([text, *blocks] if text else blocks)


class Glm45(Glm47):
    """GLM 4.5 writes every tag on a line of its own."""

    newline = "\n"
