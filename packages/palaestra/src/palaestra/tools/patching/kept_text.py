"""Rewrites lines of a file that a model quoted inexactly, and keeps whatever the model did not mean to change.

The quoted text has the same words as the file's lines, but other white space, quotes or dashes. Lines and words that
the quoted and the new text share are therefore taken from the file, so an edit never writes a model's memory of a line
back into the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from palaestra.tools.patching.edit_diff import BoundedMatcher, Opcode
from palaestra.tools.patching.lines import Reindent, indent_of

_TOKEN = re.compile(r"([^\S\n]*)(\n|\S+|$)")
"""White space within a line, and the word or line end after it."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """The change from the lines that a model quoted (`old`) to those that it wants (`new`)."""

    old: list[str]
    new: list[str]
    opcodes: list[Opcode]

    @classmethod
    def of(cls, old: str, new: str) -> Rewrite:
        lines = old.split("\n"), new.split("\n")
        return cls(*lines, BoundedMatcher(*lines).get_opcodes())

    def apply(self, real: Sequence[str]) -> str:
        """Return the new text in place of `real`, the lines of the file that the model quoted."""
        done: list[str] = []
        reindent = Reindent.between(self.old, real)
        for kind, old_start, old_end, new_start, new_end in self.opcodes:
            if kind == "equal":
                done += real[old_start:old_end]
            elif new_start < new_end:
                old, known = "\n".join(self.old[old_start:old_end]), "\n".join(real[old_start:old_end])
                done.append(_rewritten(old, "\n".join(self.new[new_start:new_end]), known, reindent))
        return "\n".join(done)


def _rewritten(old: str, new: str, real: str, reindent: Reindent) -> str:
    """Return `new` with the words and the white space of `real` wherever they correspond to those of `old`."""
    quoted, wanted, known = (_TOKEN.findall(text) for text in (old, new, real))
    # Then the words of the file and of the quotation do not correspond one to one, so none can be kept.
    if len(quoted) != len(known):
        quoted = known = []
    pairs = dict(_word_pairs([word for _, word in quoted], [word for _, word in wanted]))
    parts: list[str] = []
    for index, (space, word) in enumerate(wanted):
        twin = pairs.get(index)
        if twin is not None and quoted[twin][0] == space:
            space = known[twin][0]
        # Only the first word of a line has the indent, which is moved to that of the file.
        elif word != "\n" and (index == 0 or wanted[index - 1][1] == "\n"):
            space = indent_of(reindent.apply(f"{space}{word}")) if word else space
        parts += [space, known[twin][1] if twin is not None and quoted[twin][1] == word else word]
    return "".join(parts)


def _word_pairs(old: list[str], new: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the index of each new word, and that of the old word that it repeats or replaces."""
    for _, old_start, old_end, new_start, new_end in BoundedMatcher(old, new).get_opcodes():
        if old_end - old_start == new_end - new_start:
            yield from zip(range(new_start, new_end), range(old_start, old_end), strict=True)
