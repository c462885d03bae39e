"""Mistral, in the three forms of its tokenizers, and Granite 3: a mark, and then a JSON list or a named call.

    Mistral, up to v10   [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...], each with an optional "id"
    v11, v12             [TOOL_CALLS]f{...}[TOOL_CALLS]g{...}
    from v13             [TOOL_CALLS]f[ARGS]{...}, with an optional [CALL_ID]id before [ARGS]
    Granite              <|tool_call|>[{"name": "f", "arguments": {...}}, ...]

Sources: mistral-common's instruct tokenizers and the models' templates; the chat templates of ibm-granite/granite-3.0
to 3.3, of which 3.1 to 3.3 also write `<tool_call>`. A list begins with a bracket; a name never does. Mistral's ids are
nine letters and digits, as its templates require. Granite 4 writes the Hermes form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from palaestra_tokens.parsers.formats.json_calls import (
    JsonBody,
    add_json,
    extent,
    read_array,
    why_not_json,
)
from palaestra_tokens.parsers.output_reader import Grammar, OutputReader
from palaestra_tokens.parsers.parser import BrokenReason, Malformed, ParsedCall, named_object
from palaestra_tokens.parsers.scan import Mark, breaks_off, find, scan_brackets, scan_value, skip

_CALLS, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[^\s\[\]{}\"'(),;]*")


class Mistral(Grammar):
    """Calls end with their JSON, without an end tag."""

    openers = (_CALLS,)
    thinking = (("[THINK]", "[/THINK]"), ("<think>", "</think>"))
    short_ids = True

    def read(self, output: OutputReader, mark: Mark) -> int | None:
        text = output.text
        begin = skip(text, mark.end)
        if text.startswith("[", begin) and not text.startswith((_ARGUMENTS, _ID), begin):
            inner = skip(text, begin + 1)
            if not text.startswith("{", inner) and inner < output.end:
                return None
            return read_array(output, mark.start, begin, with_ids=True)
        if begin >= output.end:
            output.broken(Malformed(BrokenReason.UNCLOSED, "no call follows"), "", mark.start, begin)
            return begin
        return self._named(output, mark, begin)

    def _named(self, output: OutputReader, mark: Mark, begin: int) -> int | None:
        text, call_id = output.text, ""
        end = skip(text, begin, _NAME)
        name, position = text[begin:end], skip(text, end)
        if text.startswith(_ID, position):
            end = skip(text, position + len(_ID), _NAME)
            call_id = text[position + len(_ID) : end]
            position = skip(text, end)
        marked = text.startswith(_ARGUMENTS, position)
        if marked:
            position = skip(text, position + len(_ARGUMENTS))
        if text.startswith("{", position):
            return add_json(output, mark.start, name, self._body(output, position), call_id)
        again = text.startswith((_ARGUMENTS, _ID), position)
        ended = not again and (breaks_off(text, position, _ARGUMENTS, _ID) or position >= output.end)
        # Without `[ARGS]`, a name touches the mark and JSON follows it. In prose, a space follows the mark.
        touching = begin == mark.end and end == position and bool(name)
        meant = output.cut if ended else text[position : position + 1] in ("[", '"')
        if not marked and not (touching and meant):
            return None  # prose that mentions the mark
        reason = BrokenReason.UNCLOSED if ended else BrokenReason.MALFORMED_JSON
        found = find(text, position, _CALLS)
        end = output.end if found is None else found.start
        output.broken(Malformed(reason, "there is no JSON object"), name, mark.start, end)
        return end

    def _body(self, output: OutputReader, begin: int) -> JsonBody:
        """Return the arguments. Broken arguments end before the mark that breaks them, or where the brackets are
        balanced."""
        scan = scan_value(output.text, begin)
        if scan.complete:
            return JsonBody(output.text[begin : scan.end], scan.end)
        problem = why_not_json(output, begin, scan.end)
        around = max(begin, scan.end - len(_CALLS))
        found = find(output.text, around, _CALLS, before=scan.end + 1)
        end = found.start if found is not None and found.end > scan.end else extent(output, begin, scan)
        return JsonBody(output.text[begin:end], end, problem)

    def render(self, calls: Sequence[ParsedCall], text: str) -> str:
        return text + "".join(f"{_CALLS}{call.name}{_ARGUMENTS}{call.arguments_text}" for call in calls)


class Granite(Grammar):
    """Each mark begins one list of calls."""

    openers = ("<|tool_call|>", "<tool_call>")

    def read(self, output: OutputReader, mark: Mark) -> int | None:
        begin = skip(output.text, mark.end)
        if output.text.startswith("[", begin):
            return read_array(output, mark.start, begin)
        problem = Malformed(BrokenReason.MALFORMED_JSON, "the calls are not a list")
        if output.text.startswith("{", begin):
            end = scan_brackets(output.text, begin)
        elif begin >= output.end:
            end, problem = begin, Malformed(BrokenReason.UNCLOSED, "the output ends where the calls begin")
        else:
            return None
        output.broken(problem, "", mark.start, end)
        return end

    def render(self, calls: Sequence[ParsedCall], text: str) -> str:
        return f"{text}<|tool_call|>[{', '.join(map(named_object, calls))}]" if calls else text
