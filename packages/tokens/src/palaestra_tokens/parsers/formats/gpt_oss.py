"""gpt-oss: messages in channels, in the harmony format.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

Source: OpenAI's harmony format guide. A message with a recipient is a call, in any channel; other messages of the
analysis channel are thinking; the rest is text. The recipient may precede the channel. An output may begin with the
recipient, because the prompt ends with `<|start|>assistant`. `<|call|>` is a stop token, so its absence breaks a call
only in a cut output.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from palaestra_tokens.parsers.formats.json_calls import Tags, add_json, tagged_body
from palaestra_tokens.parsers.output_reader import Grammar, OutputReader
from palaestra_tokens.parsers.parser import BrokenReason, Malformed, ParsedCall
from palaestra_tokens.parsers.scan import Mark, find, skip

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_TAGS = Tags(_START, ("<|call|>",))
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


class GptOss(Grammar):
    """Reads one message after another."""

    openers = (_START, _CHANNEL, *_ENDS)
    thinking: ClassVar[Sequence[tuple[str, str]]] = ()

    def begin(self, output: OutputReader) -> int:
        """Read a call whose `<|start|>assistant` is the end of the prompt."""
        if not output.text.startswith("to=", skip(output.text, 0)):
            return 0
        return self.read(output, Mark(_START, 0, 0)) or 0

    def read(self, output: OutputReader, mark: Mark) -> int | None:
        if mark.text in _ENDS:
            return mark.end
        header_tags = (_MESSAGE, _START, _CHANNEL, *_ENDS)
        end = find(output.text, mark.end, *header_tags)
        if end is not None and end.text == _CHANNEL and mark.text == _START:
            end = find(output.text, end.end, *header_tags)
        if end is None or end.text != _MESSAGE:
            return self._no_message(output, mark, output.end if end is None else end.start)
        header = output.text[mark.start : end.start]
        recipient = _RECIPIENT.search(header)
        # A recipient makes a message a call, whatever its channel is. Source: OpenAI's harmony response format.
        if recipient is not None:
            body = tagged_body(output, end.end, _TAGS)
            return add_json(output, mark.start, recipient[1].removeprefix("functions."), body)
        return self._read_message(output, mark, end.end, thinking=_ANALYSIS.search(header) is not None)

    def _no_message(self, output: OutputReader, mark: Mark, end: int) -> int | None:
        """Read a header without a message. The header `assistant` alone is skipped. A header with a recipient at the
        end of a cut output is a broken call. Any other header is only a mention."""
        header = output.text[mark.end : end]
        if mark.text == _START and header.strip() == "assistant":
            return end  # the header of a message that never began
        if _RECIPIENT.search(header) is None or end < output.end or not output.cut:
            return None
        output.broken(Malformed(BrokenReason.UNCLOSED, "the output was cut off in a header"), "", mark.start, end)
        return end

    def _read_message(self, output: OutputReader, mark: Mark, begin: int, thinking: bool) -> int:
        output.skip_to(begin)
        found = find(output.text, begin, _START, _CHANNEL, *_ENDS) or Mark("", output.end, output.end)
        end = found.start if found.text in (_START, _CHANNEL) else found.end
        if thinking:
            output.reasoning(mark.start, slice(begin, found.start), end)
        else:
            output.text_to(found.start)
            output.skip_to(end)
        return end

    def render(self, calls: Sequence[ParsedCall], text: str) -> str:
        """Return the text and then the calls. The calls are in the commentary channel; the text is in the final channel
        if no calls follow, otherwise also in the commentary channel."""
        channel = "commentary" if calls else "final"
        messages = [f"{_CHANNEL}{channel}{_MESSAGE}{text}<|end|>"] if text else []
        for call in calls:
            recipient = f"to=functions.{call.name} <|constrain|>json"
            messages.append(f"{_CHANNEL}commentary {recipient}{_MESSAGE}{call.arguments_text}<|call|>")
        return f"{_START}assistant".join(messages)
