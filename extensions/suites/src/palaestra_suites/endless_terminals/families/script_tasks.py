"""Tasks about programs to write or fix, checked with hidden inputs.

Each function that returns a `ProgramTask` builds one kind of task; its docstring, if any, describes what the program
must do or which mistake must be fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from palaestra_suites.endless_terminals.checks.program_checks import Case, Runs
from palaestra_suites.endless_terminals.family import Build, DataFile, Family, TaskPart
from palaestra_suites.endless_terminals.random_stream import Draw
from palaestra_suites.endless_terminals.words import NOUNS, PEOPLE, SERVICES

_BASH, _PYTHON = "bash", "python3"


@dataclass(frozen=True, slots=True)
class ProgramTask:
    """A program to write: its description, a solution, an example for the prompt, and the cases of the check.

    `broken`, if not empty, is a version with a mistake; the task is then to fix it.
    """

    ask: str
    text: str
    example: Case
    cases: Sequence[Case]
    language: str = _PYTHON
    broken: str = ""


ProgramStep: TypeAlias = Callable[[Draw], ProgramTask]


def _example_text(case: Case) -> str:
    """Return a case as the prompt shows it."""
    given = [f"the arguments `{' '.join(case.arguments)}`"] if case.arguments else []
    given += [f"the input `{case.stdin.rstrip()!r}`"] if case.stdin else []
    return f"For example, with {' and '.join(given)} it prints `{case.output.rstrip()!r}`."


def program_family(step: ProgramStep) -> Build:
    """Return a function that builds task parts. Each part asks for the program that `step` describes to be written or,
    if there is a broken version, to be fixed."""

    def build(draw: Draw, place: str, given: DataFile | None) -> TaskPart:
        program = step(draw)
        path = f"{place}/{draw.fresh()}.{'sh' if program.language == _BASH else 'py'}"
        files = {path: program.broken} if program.broken else {}
        what = "Bash" if program.language == _BASH else "Python (standard library only)"
        begin = (
            f"`{path}` does not do what it should; mend it. It is started with `{program.language} {path}`. What it "
            "should do: "
            if program.broken
            else f"Write `{path}`, a program in {what} that is started with `{program.language} {path}`. "
        )
        example = _example_text(program.example)
        ask = f"{begin}{program.ask} {example} It is checked with other inputs, from another directory."
        solution = f"mkdir -p {place}\ncat > {path} <<'PROGRAM'\n{program.text.strip()}\nPROGRAM\n"
        check = Runs(path, [program.language], [program.example, *program.cases])
        return TaskPart(ask, solution, (check,), files)

    return build


def cipher(draw: Draw) -> ProgramTask:
    """Shift letters and keep everything else."""
    shift = draw.between(2, 23)

    def shifted(text: str) -> str:
        return "".join(
            chr((ord(c) - base + shift) % 26 + base) if c.isalpha() else c
            for c in text
            for base in [65 if c.isupper() else 97]
        )

    texts = [f"{draw.sentence().title()}, {draw.between(1, 99)}!\n" for _ in range(4)]
    cases = [Case(shifted(text), stdin=text) for text in texts]
    text = (
        "import sys\nout = ''\nfor c in sys.stdin.read():\n    if c.isascii() and c.isalpha():\n"
        "        base = 65 if c.isupper() else 97\n"
        f"        c = chr((ord(c) - base + {shift}) % 26 + base)\n    out += c\nsys.stdout.write(out)"
    )
    ask = (
        f"It reads text from standard input and prints it with every letter a-z and A-Z moved {shift} places on in "
        "the alphabet "
        "(after z comes a; capitals stay capitals); everything else stays."
    )
    return ProgramTask(ask, text, cases[0], cases[1:])


def column_sum(draw: Draw) -> ProgramTask:
    """Add up one column of any file."""
    words = draw.words(3)

    def case(column: str) -> Case:
        rows = [[draw.between(-50, 500) for _ in words] for _ in range(draw.between(3, 9))]
        text = ",".join(words) + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)
        total = sum(row[words.index(column)] for row in rows)
        name = f"{draw.fresh()}.csv"
        return Case(f"{total}\n", [name, column], files={name: text})

    cases = [case(draw.pick(words)) for _ in range(4)]
    missing = Case("", [cases[0].arguments[0], "absent"], files=cases[0].files, exit_code=2)
    text = (
        "import csv, sys\nwith open(sys.argv[1], newline='') as file:\n    reader = csv.DictReader(file)\n"
        "    if sys.argv[2] not in (reader.fieldnames or []):\n        sys.exit(2)\n"
        "    print(sum(int(row[sys.argv[2]]) for row in reader))"
    )
    ask = (
        "It takes two arguments, the path of a CSV file with a header line and the name of one of its columns of "
        "whole numbers, "
        "and prints the sum of that column. A column that is not there ends it with exit code 2. (In the example, the "
        "file is "
        f"`{cases[0].files[cases[0].arguments[0]]!r}`.)"
    )
    return ProgramTask(ask, text, cases[0], [*cases[1:], missing])


def log_filter(draw: Draw) -> ProgramTask:
    """Print the numbered messages of one service, in a shell script."""
    services = draw.sample(SERVICES, 3)

    def case(service: str) -> Case:
        lines = [f"{draw.pick(services)}: {draw.sentence(NOUNS, 2, 4)}" for _ in range(10)]
        kept = [line for line in lines if line.startswith(f"{service}: ")]
        output = "".join(f"{n} {line.partition(': ')[2]}\n" for n, line in enumerate(kept, 1))
        return Case(output, [service], "".join(f"{line}\n" for line in lines))

    ask = (
        "Lines of its standard input are `SERVICE: MESSAGE`. Its one argument is a service; it prints the messages of "
        "that service "
        "in their order, each with its number, counted from 1, and a blank before it. Without any such line it prints "
        "nothing, and "
        "ends with exit code 0 all the same."
    )
    text = 'awk -v s="$1" \'index($0, s ": ") == 1 {print ++n, substr($0, length(s) + 3)}\''
    return ProgramTask(ask, text, case(services[0]), [case(service) for service in [*services, "nothing"]], _BASH)


def roman(draw: Draw) -> ProgramTask:
    values = (1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1)
    numerals = tuple(zip(values, ["M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"], strict=True))

    def roman_numeral(number: int) -> str:
        out = ""
        for value, letters in numerals:
            out += letters * (number // value)
            number %= value
        return out

    numbers = [draw.between(1, 3999) for _ in range(5)]
    back = draw.chance(50)
    cases = [
        Case(f"{n}\n", [roman_numeral(n)]) if back else Case(f"{roman_numeral(n)}\n", [str(n)])
        for n in [*numbers, 1, 1994]
    ]
    table = f"table = {[*map(list, numerals)]!r}\n"
    write = "def roman(n):\n    out = ''\n    for v, s in table:\n"
    write += "        out, n = out + s * (n // v), n % v\n    return out\n"
    last = "print(next(n for n in range(1, 4000) if roman(n) == word))" if back else "print(roman(int(word)))"
    ask = (
        "Its one argument is a Roman numeral (1 to 3999, in capitals); it prints the number."
        if back
        else "Its one argument is a number from 1 to 3999; it prints it as a Roman numeral in capitals."
    )
    return ProgramTask(ask, f"import sys\nword = sys.argv[1]\n{table}{write}{last}", cases[0], cases[1:])


def totals(draw: Draw) -> ProgramTask:
    """Convert JSON lines to a sorted report."""
    key, value = draw.words(2)

    def case(rows: int) -> Case:
        people = draw.sample(PEOPLE, 4)
        records = [(draw.pick(people), draw.between(1, 99)) for _ in range(rows)]
        sums: dict[str, int] = {}
        for name, number in records:
            sums[name] = sums.get(name, 0) + number
        output = "".join(f"{name}\t{sums[name]}\n" for name in sorted(sums))
        return Case(output, stdin="".join(f'{{"{key}": "{name}", "{value}": {number}}}\n' for name, number in records))

    ask = (
        f"Each line of its standard input is a JSON object with the text `{key}` and the whole number `{value}`. It "
        "prints the sum "
        f"of `{value}` for each `{key}`: `NAME<TAB>SUM`, one line each, sorted by name. Empty input prints nothing."
    )
    text = (
        "import json, sys\nsums = {}\nfor line in sys.stdin:\n    row = json.loads(line)\n"
        f"    sums[row[{key!r}]] = sums.get(row[{key!r}], 0) + row[{value!r}]\n"
        "for name in sorted(sums):\n    print(name, sums[name], sep='\\t')"
    )
    return ProgramTask(ask, text, case(3), [case(8), case(12), case(0)])


def mended_median(draw: Draw) -> ProgramTask:
    """Fix a median that sorts numbers as text, mishandles even counts, or reads only a part of its input."""

    def case(count: int) -> Case:
        numbers = [draw.between(1, 1500) for _ in range(count)]
        ranked = sorted(numbers)
        middle = ranked[(count - 1) // 2]
        return Case(f"{middle}\n", stdin=" ".join(map(str, numbers)) + "\n")

    right = (
        "import sys\nnumbers = sorted(map(int, sys.stdin.read().split()))\nprint(numbers[(len(numbers) - 1) // 2])\n"
    )
    wrong = draw.pick(
        (
            right.replace("sorted(map(int, sys.stdin.read().split()))", "sorted(sys.stdin.read().split())"),
            right.replace("(len(numbers) - 1) // 2", "len(numbers) // 2 - 1"),
            right.replace("sys.stdin.read()", "sys.stdin.readline()[:12]"),
        )
    )
    ask = (
        "It reads whole numbers from standard input (separated by blanks or line ends, at least one) and prints their "
        "median; of an "
        "even count, the smaller of the two in the middle."
    )
    return ProgramTask(ask, right, case(5), [case(8), case(1), case(13), case(30)], broken=wrong)


def mended_backup(draw: Draw) -> ProgramTask:
    """Fix a shell script that breaks on blanks in names."""
    ending = draw.pick(["txt", "md", "cfg"])

    def case() -> Case:
        names = [f"{draw.fresh()} {draw.fresh()}.{ending}", f"{draw.fresh()}.{ending}", f"{draw.fresh()}.dat"]
        files = {f"in/{name}": draw.prose(draw.between(1, 3)) for name in names}
        kept = sorted(name for name in names if name.endswith(f".{ending}"))
        output = "".join(f"{name}: {files[f'in/{name}'].count(chr(10))}\n" for name in kept)
        return Case(output, ["in"], files=files)

    right = (
        f'export LC_ALL=C\ncd "$1" || exit 1\nfor f in *.{ending}; do\n  [ -e "$f" ] || continue\n'
        '  echo "$f: $(($(wc -l < "$f")))"\ndone\n'
    )
    wrong = f"for f in $(ls $1/*.{ending}); do\n  echo $f: $(wc -l < $f)\ndone\n"
    example = Case(f"{(name := draw.fresh())}.{ending}: 1\n", ["in"], files={f"in/{name}.{ending}": "one line\n"})
    none = Case("", ["in"], files={"in/other.dat": "x\n"})
    ask = (
        f"Its one argument is a directory; for each `.{ending}` file directly in it (names may have blanks), in byte "
        "order of the "
        "names, it prints `NAME: COUNT`, where NAME is without directory and COUNT is its number of lines. Where "
        "there is none it "
        f"prints nothing. (In the example, `in` has one such file, of one line, called `{name}.{ending}`.)"
    )
    return ProgramTask(ask, right, example, [case(), case(), none], _BASH, wrong)


def wrapped(draw: Draw) -> ProgramTask:
    """Wrap text greedily at a width."""

    def case() -> Case:
        words = [draw.pick(NOUNS) for _ in range(draw.between(15, 30))]
        width, lines = draw.between(14, 40), [""]
        for word in words:
            joined = f"{lines[-1]} {word}".strip()
            if len(joined) <= width:
                lines[-1] = joined
            else:
                lines.append(word)
        return Case("".join(f"{line}\n" for line in lines), [str(width)], " ".join(words) + "\n")

    ask = (
        "Its one argument is a width. It reads words from standard input (blanks and line ends separate them) and "
        "prints them in "
        "their order, one blank between, with as many words on each line as fit into the width; no word is longer "
        "than the width."
    )
    text = (
        "import sys\nwidth, line = int(sys.argv[1]), ''\nfor word in sys.stdin.read().split():\n"
        "    joined = (line + ' ' + word).strip()\n    if len(joined) > width:\n        print(line)\n        joined = "
        "word\n"
        "    line = joined\nprint(line)"
    )
    return ProgramTask(ask, text, case(), [case(), case(), case()])


FAMILIES = (
    Family("script-cipher", program_family(cipher)),
    Family("script-column", program_family(column_sum)),
    Family("script-filter", program_family(log_filter)),
    Family("script-roman", program_family(roman)),
    Family("script-totals", program_family(totals)),
    Family("script-wrap", program_family(wrapped)),
    Family("script-mend-median", program_family(mended_median)),
    Family("script-mend-shell", program_family(mended_backup)),
)
