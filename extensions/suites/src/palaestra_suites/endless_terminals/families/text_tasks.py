"""Tasks about lines of text: sort, count, cut, compare, clean and fill in.

Each function that returns a `TaskPart` or a `LineOp` builds one kind of task; its docstring, if any, describes the work
that the task asks for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from palaestra_suites.endless_terminals.checks.data_checks import Json
from palaestra_suites.endless_terminals.checks.file_checks import FileContent, Files, Lines
from palaestra_suites.endless_terminals.family import (
    Build,
    DataFile,
    DataKind,
    Family,
    TaskPart,
    UnfitInputError,
    python,
)
from palaestra_suites.endless_terminals.random_stream import Draw
from palaestra_suites.endless_terminals.words import CITIES, NOUNS, PEOPLE


def lines_source(draw: Draw, place: str, given: DataFile | None) -> tuple[DataFile, dict[str, str]]:
    """Return the file with the lines to work on, and the initial files that it needs. The file is `given` if that has
    lines, or else a generated one."""
    if given is not None and not given.table:
        return given, {}
    vocabulary = draw.words(draw.between(5, 9))
    shape = draw.below(3)
    if shape == 0:
        lines = [draw.pick(vocabulary) for _ in range(draw.between(12, 30))]
    elif shape == 1:
        lines = [f"{draw.pick(PEOPLE)} {draw.pick(vocabulary)} {draw.between(1, 99)}" for _ in range(20)]
    else:
        lines = [draw.sentence(vocabulary, 3, 7) for _ in range(draw.between(10, 18))]
    source = DataFile(f"{place}/{draw.fresh()}.txt", "lines", lines=tuple(lines))
    return source, {source.path: "".join(f"{line}\n" for line in lines)}


@dataclass(frozen=True, slots=True)
class LineOp:
    """One operation: its prompt, a shell command that prints the result, and the expected lines."""

    ask: str
    shell: str
    lines: list[str]


LineStep: TypeAlias = Callable[[Draw, tuple[str, ...]], LineOp]


def line_family(step: LineStep) -> Build:
    """Return a function that builds task parts. Each part asks to read lines, apply the operation that `step` draws,
    and write the resulting lines."""

    def build(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
        source, files = lines_source(draw, place, given)
        op = step(draw, source.lines)
        if not op.lines or op.lines == list(source.lines):
            raise UnfitInputError("the operation would change nothing or leave nothing")
        target = DataFile(f"{place}/{draw.fresh()}.txt", "lines", lines=tuple(op.lines))
        ask = draw.pick(
            (
                f"Read the lines of `{source.path}` and write to `{target.path}`: {op.ask}",
                f"Make `{target.path}` out of `{source.path}`. It holds, one per line: {op.ask}",
                f"`{target.path}` is to hold the following, made from the lines of `{source.path}`: {op.ask}",
            )
        )
        solution = f"export LC_ALL=C\n{op.shell.replace('INPUT', source.path)} > {target.path}\n"
        return TaskPart(ask, solution, (Lines(target.path, op.lines),), files, output=target)

    return build


def distinct(draw: Draw, lines: tuple[str, ...]) -> LineOp:
    if draw.chance(50):
        return LineOp(
            "every distinct line once, sorted by byte value (as `LC_ALL=C sort`).", "sort -u INPUT", sorted({*lines})
        )
    return LineOp(
        "every distinct line once, in the order of first appearance.",
        "awk '!seen[$0]++' INPUT",
        [*dict.fromkeys(lines)],
    )


def repeated(draw: Draw, lines: tuple[str, ...]) -> LineOp:
    found = sorted({line for line in lines if lines.count(line) > 1})
    return LineOp(
        "every line that occurs more than once, given once each, sorted by byte value (as `LC_ALL=C sort`).",
        "sort INPUT | uniq -d",
        found,
    )


def word_counts(draw: Draw, lines: tuple[str, ...]) -> LineOp:
    counts: dict[str, int] = {}
    for word in " ".join(lines).split():
        counts[word] = counts.get(word, 0) + 1
    count = draw.between(2, 4)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:count]
    return LineOp(
        f"the {count} most frequent words (split at blanks), each as `COUNT WORD` with one blank between, highest "
        "count first; words of the same count in byte order (as `LC_ALL=C sort`).",
        "tr -s ' ' '\\n' < INPUT | sed '/^$/d' | sort | uniq -c | sort -k1,1nr -k2 | "
        f"head -n {count} | awk '{{print $1, $2}}'",
        [f"{number} {word}" for word, number in ranked],
    )


def sliced(draw: Draw, lines: tuple[str, ...]) -> LineOp:
    if len(lines) < 4:
        raise UnfitInputError("too few lines")
    first = draw.between(2, len(lines) // 2)
    last = draw.between(first, len(lines) - 1)
    if draw.chance(50):
        return LineOp(
            f"lines {first} to {last} (the first line is 1), last one first.",
            f"sed -n '{first},{last}p' INPUT | tac",
            list(lines[first - 1 : last][::-1]),
        )
    step = draw.between(2, 3)
    return LineOp(
        f"every {'second' if step == 2 else 'third'} line, starting with line {step} (the first line is 1).",
        f"awk 'NR % {step} == 0' INPUT",
        list(lines[step - 1 :: step]),
    )


def numbered(draw: Draw, lines: tuple[str, ...]) -> LineOp:
    start, width = draw.between(1, 50), draw.between(3, 5)
    return LineOp(
        f"every line with a number before it, counting from {start}, padded with zeros to {width} digits and followed "
        "by "
        "a colon and one blank.",
        f"awk '{{printf \"%0{width}d: %s\\n\", NR + {start - 1}, $0}}' INPUT",
        [f"{number:0{width}}: {line}" for number, line in enumerate(lines, start)],
    )


def longer(draw: Draw, lines: tuple[str, ...]) -> LineOp:
    bound = sorted(map(len, lines))[len(lines) // 2]
    upper = draw.chance(50)
    kept = [line.upper() if upper else line for line in lines if len(line) >= bound]
    change = ", in capitals" if upper else ""
    call = "toupper($0)" if upper else "$0"
    return LineOp(
        f"the lines that have {bound} characters or more (blanks count), in their order{change}.",
        f"awk 'length($0) >= {bound} {{print {call}}}' INPUT",
        kept,
    )


def replaced(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Replace a whole word in every file whose name has a given ending."""
    old, new = draw.fresh(), draw.fresh()
    others = draw.words(4)
    folder = f"{place}/{draw.fresh()}"
    vocabulary = [*others, old, f"{old}s", f"un{old}"]
    names = [
        f"{draw.pick(['', 'a/', 'b/c/'])}{word}.{ending}"
        for word, ending in zip(draw.words(5), ["txt", "txt", "txt", "md", "cfg"], strict=True)
    ]
    files = {name: f"{old} first\n" + "".join(f"{draw.sentence(vocabulary)}\n" for _ in range(6)) for name in names}
    after = {name: re.sub(rf"\b{old}\b", new, text) if name.endswith(".txt") else text for name, text in files.items()}
    ask = (
        f"In every `.txt` file below `{folder}`, at any depth, replace the word `{old}` by `{new}`: whole words only, "
        "so "
        f"`{old}s` and `un{old}` stay. Files with other endings stay as they are, and no file may be added."
    )
    solution = f"find {folder} -name '*.txt' -exec sed -i 's/\\b{old}\\b/{new}/g' {{}} +\n"
    return TaskPart(
        ask, solution, (Files(folder, {**after}),), {f"{folder}/{name}": text for name, text in files.items()}
    )


def compared(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Compare two lists: words in one of them, or in both."""
    words = draw.words(16)
    left = draw.shuffled(words[:11])
    right = draw.shuffled(words[6:])
    a, b = f"{place}/{draw.fresh()}.list", f"{place}/{draw.fresh()}.list"
    what, option, found = draw.pick(
        (
            (f"in `{a}` but not in `{b}`", "-23", set(left) - set(right)),
            (f"in `{b}` but not in `{a}`", "-13", set(right) - set(left)),
            ("in both", "-12", set(left) & set(right)),
        )
    )
    target = DataFile(f"{place}/{draw.fresh()}.txt", "lines", lines=tuple(sorted(found)))
    ask = (
        f"`{a}` and `{b}` have one word per line. Write the words that are {what} to `{target.path}`, sorted, one per "
        "line."
    )
    solution = f"export LC_ALL=C\ncomm {option} <(sort {a}) <(sort {b}) > {target.path}\n"
    texts = {a: "\n".join(left) + "\n", b: "\n".join(right) + "\n"}
    return TaskPart(ask, solution, (Lines(target.path, sorted(found)),), texts, output=target)


def extracted(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Find every code in a text that matches a pattern."""
    prefix = draw.fresh()[:3].upper()
    codes = [f"{prefix}-{draw.between(1000, 9999)}" for _ in range(draw.between(5, 9))]
    decoys = [
        f"{prefix}-{draw.between(10, 999)}",
        f"{prefix.lower()}-{draw.between(1000, 9999)}",
        f"{prefix}{codes[0][4:]}",
    ]
    marks = draw.shuffled([*codes, *decoys, codes[0]])
    text = "".join(f"{draw.sentence(NOUNS, 2, 5)} ({mark}), {draw.sentence(NOUNS, 1, 4)}.\n" for mark in marks)
    source, target = f"{place}/{draw.fresh()}.txt", f"{place}/{draw.fresh()}.txt"
    found = sorted({*codes})
    ask = (
        f"`{source}` mentions codes that are `{prefix}-` followed by exactly four digits (capitals matter). Write each "
        f"such code once to `{target}`, sorted by byte value, one per line."
    )
    solution = f"export LC_ALL=C\ngrep -oE '\\b{prefix}-[0-9]{{4}}\\b' {source} | sort -u > {target}\n"
    output = DataFile(target, "lines", lines=tuple(found))
    return TaskPart(ask, solution, (Lines(target, found),), {source: text}, output=output)


def filled(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Fill in a template from a file of values."""
    keys = draw.words(3)
    template = f"{place}/template.txt"
    values = f"{place}/{draw.fresh()}.env"
    target = f"{place}/{draw.fresh()}.txt"
    known = {key.upper(): f"{draw.pick(PEOPLE)} of {draw.pick(CITIES)}" for key in keys}
    text = (
        "".join(
            f"{draw.sentence(NOUNS, 1, 3)} {{{{{draw.pick(sorted(known))}}}}} {draw.sentence(NOUNS, 1, 3)}\n"
            for _ in range(5)
        )
        + f"{{{{{draw.fresh().upper()}}}}} and {{{{{sorted(known)[0]}}}}}\n"
    )
    result = text
    for key, value in known.items():
        result = result.replace(f"{{{{{key}}}}}", value)
    ask = (
        f"`{template}` has placeholders of the form `{{{{NAME}}}}`; `{values}` gives values as lines `NAME=VALUE`. "
        "Write the "
        f"template with every placeholder replaced by its value to `{target}`. A placeholder without a value stays as "
        "it "
        "is; the template file itself must not change."
    )
    code = (
        f"text = open({template!r}).read()\nfor line in open({values!r}):\n    key, _, value = "
        "line.strip().partition('=')\n"
        f"    text = text.replace('{{{{' + key + '}}}}', value)\nopen({target!r}, 'w').write(text)"
    )
    files = {template: text, values: "".join(f"{key}={value}\n" for key, value in known.items())}
    return TaskPart(ask, python(code), (FileContent(target, result), FileContent(template, text)), files)


def cleaned(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Remove Windows line ends, trailing blanks and empty lines; checked byte for byte."""
    path = f"{place}/{draw.fresh()}.txt"
    lines = [draw.sentence() for _ in range(draw.between(6, 12))]
    messy = "".join(f"{line}{' ' * draw.below(3)}\r\n" + "\r\n" * draw.below(3) for line in lines)
    ask = (
        f"Clean `{path}` in place: its lines end in CR LF and must end in LF alone, blanks at the ends of lines go, "
        "and "
        "empty lines go. Every line, the last one too, ends with a newline. Nothing else changes."
    )
    solution = f"sed -i -e 's/\\r$//' -e 's/ *$//' -e '/^$/d' {path}\n"
    clean = FileContent(path, "".join(f"{line}\n" for line in lines), exact=True)
    return TaskPart(ask, solution, (clean,), {path: messy})


def measured(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
    """Count lines, words and bytes of several files, as JSON."""
    names = draw.words(draw.between(3, 5))
    files = {f"{place}/notes/{name}.txt": draw.prose(draw.between(2, 12)) for name in names}
    target = f"{place}/{draw.fresh()}.json"
    value = {
        f"{name}.txt": {"lines": text.count("\n"), "words": len(text.split()), "bytes": len(text)}
        for name, text in zip(names, files.values(), strict=True)
    }
    ask = (
        f"Count the lines, words and bytes (as `wc` does) of every file in `{place}/notes` and write `{target}`: a "
        "JSON "
        "object that maps each file's name (without directory) to an object with the numbers `lines`, `words`, `bytes`."
    )
    code = (
        f"import json, os\nresult = {{}}\nfor name in os.listdir('{place}/notes'):\n"
        f"    data = open('{place}/notes/' + name, 'rb').read()\n"
        "    result[name] = {'lines': data.count(b'\\n'), 'words': len(data.split()), 'bytes': len(data)}\n"
        f"json.dump(result, open({target!r}, 'w'))"
    )
    return TaskPart(ask, python(code), (Json(target, value),), files)


def _takes_lines(name: str, step: LineStep) -> Family:
    return Family(name, line_family(step), takes=(DataKind.LINES,))


FAMILIES = (
    _takes_lines("text-distinct", distinct),
    _takes_lines("text-repeated", repeated),
    _takes_lines("text-word-counts", word_counts),
    _takes_lines("text-slice", sliced),
    _takes_lines("text-number", numbered),
    _takes_lines("text-longer", longer),
    Family("text-replace", replaced),
    Family("text-compare", compared),
    Family("text-extract", extracted),
    Family("text-template", filled),
    Family("text-clean", cleaned),
    Family("text-measure", measured),
)
