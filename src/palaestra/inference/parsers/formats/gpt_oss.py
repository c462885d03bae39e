"""gpt-oss: messages in channels, as the harmony format has them.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

Source: OpenAI's harmony format guide. A message with a recipient is a call, in whatever channel; other messages of the
analysis channel are thinking; the rest is text. The recipient may stand before the channel too, as the template of
openai/gpt-oss writes it; since the prompt ends with `<|start|>assistant`, an output may begin with it. `<|call|>` is a
stop token, so it is usually missing at the end of an output; that counts against a call only in an output that was cut.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from palaestra.inference.parsers.parser import Call, Malformed, Reason
from palaestra.inference.parsers.reader import Grammar, Output
from palaestra.inference.parsers.syntax.json_calls import Tags, json_body
from palaestra.inference.parsers.syntax.json_text import decode_object
from palaestra.inference.parsers.text_source import Mark, Markers, Reading

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_TAGS = Tags(_START, ("<|call|>",))
_HEADER = Markers(_MESSAGE, _START, _CHANNEL, *_ENDS)
_BODY = Markers(_START, _CHANNEL, *_ENDS)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


class GptOss(Grammar):
    """One message after the other."""

    openers: ClassVar[Markers] = Markers(_START, _CHANNEL, *_ENDS)
    thinking: ClassVar[Sequence[tuple[str, str]]] = ()

    def begin(self, output: Output) -> Reading[int]:
        """A call whose `<|start|>assistant` is the end of the prompt."""
        recipient = yield from output.source.skip(0)
        if not (yield from output.source.at(recipient, "to=")):
            return 0
        return (yield from self.read(output, Mark(_START, 0, 0))) or 0

    def read(self, output: Output, mark: Mark) -> Reading[int | None]:
        """One message, or an end mark that was left over."""
        source = output.source
        if mark.text in _ENDS:
            return mark.end
        end = yield from source.find(_HEADER, mark.end)
        if end is not None and end.text == _CHANNEL and mark.text == _START:
            end = yield from source.find(_HEADER, end.end)
        if end is None or end.text != _MESSAGE:
            return (yield from self._no_message(output, mark, source.end if end is None else end.start))
        header = source.read(mark.start, end.start)
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            return (yield from self._call(output, mark, end.end, recipient[1]))
        return (yield from self._spoken(output, mark, end.end, thinking=_ANALYSIS.search(header) is not None))

    def _no_message(self, output: Output, mark: Mark, end: int) -> Reading[int | None]:
        """A header without a message: unfinished at the end of a cut output, or only mentioned."""
        yield from ()
        header = output.source.read(mark.end, end)
        if mark.text == _START and header.strip() == "assistant":
            return end  # a message that was not begun
        recipient = _RECIPIENT.search(header)
        if recipient is None or end < output.source.end or not output.source.cut:
            return None
        output.page.broken(Malformed(Reason.UNCLOSED, "the output was cut off in a header"), "", mark.start, end)
        return end

    def _call(self, output: Output, mark: Mark, begin: int, recipient: str) -> Reading[int]:
        name = recipient.removeprefix("functions.")
        body = yield from json_body(output.source, begin, _TAGS)
        problem = body.problem
        if problem is None and not name:
            problem = Malformed(Reason.NO_NAME, "the call has no name")
        if problem is None:
            try:
                output.page.call(name, decode_object(body.text), body.text, mark.start, body.end)
            except Malformed as malformed:
                problem = malformed
            else:
                return body.end
        output.page.broken(problem, name, mark.start, body.end)
        return body.end

    def _spoken(self, output: Output, mark: Mark, begin: int, thinking: bool) -> Reading[int]:
        page = output.page
        page.skip_to(begin)
        passed = page.reasoning_to if thinking else page.text_to
        found = yield from output.source.find(_BODY, begin, passed=passed)
        stop = output.source.end if found is None else found.start
        end = stop if found is None or found.text in (_START, _CHANNEL) else found.end
        passed(stop)
        if thinking:
            page.end_reasoning(mark.start, end)
        else:
            page.skip_to(end)
        return end

    def render(self, calls: Sequence[Call], text: str) -> str:
        """Text in the commentary channel when calls follow it, in the final channel otherwise."""
        channel = "commentary" if calls else "final"
        messages = [f"{_CHANNEL}{channel}{_MESSAGE}{text}<|end|>"] if text else []
        for call in calls:
            recipient = f"to=functions.{call.name} <|constrain|>json"
            messages.append(f"{_CHANNEL}commentary {recipient}{_MESSAGE}{call.arguments_text}<|call|>")
        return f"{_START}assistant".join(messages)
