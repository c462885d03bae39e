"""Read the statuses of tests from the log of a test command.

Most runners print one line for each test, so most parsers are one row of `LINES`: a pattern with the groups `status`
and `name`, and the words for passed, failed and skipped. Runners that print a tree of suites, or XML, have a function.
`parser` finds a parser by the name that a data set uses. Names that are not in this module are looked up in the package
`swebench`, if it is installed (extra `swe`): some of its parsers read the log of a single repository.

Source of the formats: `swebench.harness.log_parsers` (5.0.2), compared on logs by
`grading/test_log_parsers.py`; Go's test2json, the TAP 13 specification, and the output of ctest and surefire.

Invariant: a log is text of code under test, so it is read in time that grows with its size alone. Line parsers get the
lines of `lines_of`, patterns are linear on such lines, names and XML are bounded, and the parsers of `swebench`, whose
patterns are not linear, run in a process with a time limit. No log makes a parser raise.

Not covered: code under test writes to the same log and can print the line of any test (see `swe/language_tests.py`).
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from xml.etree import ElementTree

from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.extras import install_command
from palaestra_suites.grading.harness import Status

Statuses = dict[str, Status]
Parser = Callable[[str], Statuses]

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-Z\\-_])")
_PASSED, _FAILED, _SKIPPED = Status.PASSED, Status.FAILED, Status.SKIPPED
_MARKS = {
    **dict.fromkeys("✓✔√", _PASSED),
    **dict.fromkeys("✕×✗✖✘", _FAILED),
    **dict.fromkeys("○↓◌↩-", _SKIPPED),
}
_TIME = re.compile(r"\s[(\[]\s*\d+(?:\.\d+)?\s*m?s\s*[)\]]\s*$|\s\d+(?:\.\d+)?\s*ms\s*$")
_TREE_MARK = re.compile(r"(?P<mark>[✓✔√✕×✗✖✘○◌-]|\d+\))\s+(?P<name>\S.*)")
_RAN = re.compile(
    r"\b[1-9]\d* (?:passing|passed|specs?\b|tests?\b|SUCCESS|FAILED)|Tests:\s+[1-9]|^# tests [1-9]|"
    r"Executed [1-9]\d* of "
)
_SUMMARY = re.compile(
    r"[ℹ#] pass\s+(\d{1,9})$|\b(\d{1,9}) passing\b|Tests:?\s.{0,200}?(\d{1,9}) passed|"
    r"test result: \w+\. (\d{1,9}) passed|"
    r"tests passed, \d{1,9} tests? failed out of (\d{1,9})|\[  PASSED  \] (\d{1,9}) test|"
    r"\b(\d{1,9}) (?:runs|tests), \d{1,9} assertions|\b(\d{1,9}) (?:examples?|specs?), \d{1,9} failure|"
    r"OK \((\d{1,9}) test|Tests: (\d{1,9}), Assertions|Tests run: (\d{1,9}), Failures|Executed (\d{1,9}) of "
)
"""The last lines of node, tape, ava, mocha, jest, vitest, cargo, ctest, googletest, minitest, test-unit, RSpec,
jasmine, PHPUnit, surefire and karma, with the number of tests that passed or ran."""
_GO_SUMMARY = re.compile(r"(?:ok|FAIL)\s+\S+\s+[\d(]")
_MOST_XML, _MOST_LEVELS = 16 << 20, 50
_LONGEST_LINE, _LONGEST_NAME, _LONGEST_TIME = 4096, 1024, 40
_FOREIGN_S = 60.0


def lines_of(log: str) -> Iterator[str]:
    """Yield the lines of a log without the colours of a terminal. Lines of over 4096 characters are left out: no runner
    prints one for a test."""
    return (_ANSI.sub("", line) for line in log.splitlines() if len(line) <= _LONGEST_LINE)


def _without_time(name: str, pattern: re.Pattern[str] = _TIME) -> str:
    """Return a name without the time that a runner prints after it."""
    match = pattern.search(name, max(0, len(name) - _LONGEST_TIME))
    return name[: match.start()].rstrip() if match else name


def _test_name(separator: str, suites: Iterable[str], name: str) -> str:
    """Return the name of a test after those of its suites."""
    return separator.join([*(suite[:_LONGEST_NAME] for suite in suites), name])[:_LONGEST_NAME]


def _lines(pattern: str, **words: str) -> Parser:
    """A runner that prints one line for each test. Later lines replace earlier ones. `words` maps a status to the words
    that the runner prints for it, separated by commas."""
    compiled = re.compile(pattern)
    statuses = {word: Status(status) for status, text in words.items() for word in text.split(",")}

    def read(log: str) -> Statuses:
        matches = (compiled.match(line.strip()) for line in lines_of(log))
        return {match["name"]: statuses[match["status"]] for match in matches if match and match["status"] in statuses}

    return read


LINES: Mapping[str, Parser] = {
    "gotest": _lines(r"--- (?P<status>PASS|FAIL|SKIP): (?P<name>.+) \(\S+\)$",
                     passed="PASS", failed="FAIL", skipped="SKIP"),
    "cargo": _lines(r"test\s+(?P<name>\S+)\s+\.\.\.\s+(?P<status>\w+)$", passed="ok", failed="FAILED"),
    "jest": _lines(r"(?P<status>[✓✕○])\s(?P<name>.+?)(?:\s\(\d+(?:\.\d+)?\s*m?s\))?$",
                   passed="✓", failed="✕", skipped="○"),
    "jest_json": _lines(r"\[(?P<status>PASSED|FAILED)\]\s(?P<name>.+)$", passed="PASSED", failed="FAILED"),
    "vitest": _lines(r"(?P<status>[✓×↓])\s(?P<name>.+?)(?:\s(?:\d+\s*m?s?|\[skipped\]))?$",
                     passed="✓", failed="×", skipped="↓"),
    "test_files": _lines(r"(?P<status>PASS|FAIL)\s(?P<name>.*?)(?:\s\([\d.]+\s?m?s\))?$", passed="PASS", failed="FAIL"),
    "ant": _lines(r"\[junit\]\s+\[(?P<status>PASS|FAIL|ERR)\]\s+(?P<name>.*)$", passed="PASS", failed="FAIL,ERR"),
    "phpunit_lines": _lines(r"(?P<status>[✔✘↩])\s*(?P<name>.*)$", passed="✔", failed="✘", skipped="↩"),
    "minitest_verbose": _lines(r"(?P<name>[^#]+#.+) = \d+\.\d+ s = (?P<status>[.FES])$",
                               passed=".", failed="F,E", skipped="S"),
    "cucumber": _lines(r"(?P<name>.*) \.+(?P<status>\.|F)", passed=".", failed="F"),
    "ruby_unit": _lines(r"(?:test: )?(?P<name>.+):\s+(?P<status>\.|E\b|F\b|O\b)",
                        passed=".", failed="E,F", skipped="O"),
    "rspec_transformed_json": _lines(r"(?P<name>.+) - (?P<status>passed|failed)", passed="passed", failed="failed"),
    "jq": _lines(r"(?P<status>PASS|FAIL):\s(?P<name>.+)$", passed="PASS", failed="FAIL"),
    "micropython_test": _lines(r"(?P<status>pass|FAIL|skip)\s+(?P<name>.+)$",
                               passed="pass", failed="FAIL", skipped="skip"),
    "googletest": _lines(r"(?:[^\[]|\[(?!\s*(?:OK|FAILED)))*\[\s*(?P<status>OK|FAILED)\s*\]\s(?P<name>.*)\s\([^()]*\)$",
                         passed="OK", failed="FAILED"),
    "ctest": _lines(r"\d+/\d+\s+Test\s+#\d+:\s+(?P<name>\S+)\s+(?:\.+\s*)?(?:\*\*\*)?(?P<status>Passed|Failed|Not|"
                    r"Timeout|Exception|Skipped)\b",
                    passed="Passed", failed="Failed,Not,Timeout,Exception", skipped="Skipped"),
    "pytest": _lines(r"(?P<status>PASSED|FAILED|ERROR|XFAIL) (?P<name>\S+?::\S+|\S+\.py\b\S*).*$",
                     passed="PASSED", failed="FAILED", error="ERROR", xfailed="XFAIL"),
    # SWE-bench keeps the description with its leading dash, and so do the names in its rows.
    "tap": _lines(r"(?P<status>ok|not ok) \d+ (?P<name>.+)$", passed="ok", failed="not ok"),
    # The name of a test that failed is followed by its file.
    "redis": _lines(r"\[(?P<status>ok|(?P<bad>err)|skip|ignore)\]:\s(?P<name>.+?)(?(bad)(?:(?<!\s)\s+in\s+\S+)?)"
                    r"(?:\s\(\d+\s*m?s\))?$",
                    passed="ok", failed="err", skipped="skip,ignore"),
    "swift": _lines(r"Test Case '(?P<name>[^']+)'\s+(?P<status>passed|failed|skipped)\b.*$",
                    passed="passed", failed="failed", skipped="skipped"),
}  # fmt: skip
"""Parsers that one pattern describes."""


_DURATION = re.compile(r"\s*\[\d+(?:\.\d+)? m?s\]$")


def without_duration(name: str) -> str:
    """Return the name of a test without the duration in brackets that PHPUnit prints after it (`adds [0.05 ms]`)."""
    return _without_time(name, _DURATION)


def _minitest(log: str) -> Statuses:
    """`NAME. … = … STATUS`: the name ends at the last point before the last equals sign before the last status."""
    found: Statuses = {}
    for line in map(str.strip, lines_of(log)):
        last = max(map(line.rfind, ".FE"))
        name = line[: max(0, line.rfind(". ", 0, max(0, line.rfind("=", 0, max(0, last)))))]
        if name:
            found[name] = _PASSED if line[last] == "." else _FAILED
    return found


def _phpunit(log: str) -> Statuses:
    """`--testdox`: a line with the class, then a line for each of its tests. With `--verbose` or a setting of the
    repository, a line ends with the test's duration, which is not part of the name."""
    found: Statuses = {}
    suite = None
    for line in lines_of(log):
        if (heading := re.match(r"(\w.+) \((?:(?! \().)+\)$", line)) is not None:
            suite = heading[1][:_LONGEST_NAME]
        elif (test := re.match(r"\s*([✔✘↩])\s*(.*)$", line)) is not None:
            found[f"{suite} > {without_duration(test[2])}"] = _MARKS[test[1]]
    return found


def _maven(log: str) -> Statuses:
    """One `mvn -Dtest=NAME` for each test: Maven prints no line for a test that passed, so the build's result counts.

    The script is traced, and traces and results may be interleaved; both are in the order of the tests.
    """
    lines = list(lines_of(log))
    tests = [match[1] for line in lines if (match := re.match(r".*-Dtest=(\S+)", line))]
    results = [line.rstrip()[-7:] for line in lines if line.rstrip().endswith(("BUILD SUCCESS", "BUILD FAILURE"))]
    return {test: _PASSED if result == "SUCCESS" else _FAILED for test, result in zip(tests, results, strict=False)}


_SUREFIRE = re.compile(r"(\d+), Failures: (\d+), Errors: (\d+), Skipped: (\d+), Time elapsed: .*?(?:- in |-- in )(\S+)")


def _surefire(log: str) -> Statuses:
    """Surefire's lines for each class, with the methods that failed."""
    found: Statuses = {}
    for line in lines_of(log):
        # Matched once, at the first place: a search would try the pattern again at each place of a hostile line.
        if (match := _SUREFIRE.match(line.partition("Tests run: ")[2])) is not None:
            run, failures, errors, skipped, name = match.groups()
            bad = failures.strip("0") or errors.strip("0")
            found[name] = _FAILED if bad else _SKIPPED if run == skipped else _PASSED
    return found


def _gradle(log: str) -> Statuses:
    """`Class > test PASSED`; the status may come on a later line, when the output of several processes is mixed."""
    found: Statuses = {}
    waiting = ""
    for line in map(str.strip, lines_of(log)):
        if (match := re.match(r"([^>].+)\s(PASSED|FAILED)$", line)) is not None:
            found[match[1]] = Status(match[2].lower())
            waiting = ""
        elif (match := re.match(r"([^>]\S*\s+>\s+\S+)$", line)) is not None:
            waiting = match[1]
        elif waiting and line in ("PASSED", "FAILED"):
            found[waiting] = Status(line.lower())
            waiting = ""
    return found


def _mocha(log: str) -> Statuses:
    """The `spec` reporter of mocha, and runners like it: an indented tree of suites with a mark before each test. Names
    have the names of their suites before them."""
    found: Statuses = {}
    suites: list[tuple[int, str]] = []
    for line in lines_of(log):
        text, indent = line.strip(), len(line) - len(line.lstrip())
        # After its summary, mocha lists the failures again in another tree, with numbers in place of marks.
        if re.match(r"\d+ passing\b", text):
            break
        if not text or not indent:
            continue
        while suites and suites[-1][0] >= indent:
            suites.pop()
        if (match := _TREE_MARK.match(text)) is not None:
            name = _test_name(" - ", (suite for _, suite in suites), _without_time(match["name"]))
            found[name] = _MARKS.get(match["mark"], _FAILED)
        elif len(suites) < _MOST_LEVELS:
            suites.append((indent, text))
    return found


def _marks(log: str) -> Statuses:
    """Names after a mark, without their suites: jest, vitest, mocha, ava, node's spec reporter. A name that failed in
    one suite has failed."""
    found: Statuses = {}
    for line in lines_of(log):
        match = _TREE_MARK.match(line.strip())
        if match is None or match["mark"] == "-":
            continue
        status = _MARKS.get(match["mark"], _FAILED)
        name = _without_time(match["name"]).strip()
        if match["mark"][0].isdigit() and name not in found and not line.startswith("    "):
            continue  # a heading in the list of failures
        if found.get(name) is not _FAILED:
            found[name] = status
    return found


def _rspec(log: str) -> Statuses:
    """`rspec --format documentation`: an indented tree of groups, whose leaves are examples. Only examples that failed
    or are pending carry a word. Names have the names of their groups before them, as in RSpec's own descriptions."""
    found: Statuses = {}
    groups: list[str] = []
    lines = [line.rstrip() for line in lines_of(log) if line.strip()]
    # A line is an example only if no deeper line follows, because groups and passed examples look the same.
    for line, after in pairwise([*lines, ""]):
        if line.startswith(("Pending: (", "Failures:", "Finished in ")):
            break
        depth = (len(line) - len(line.lstrip())) // 2
        if depth > min(len(groups), _MOST_LEVELS):
            continue  # printed by code under test
        groups[depth:] = [line.strip()]
        if depth and len(after) - len(after.lstrip()) <= 2 * depth:
            name, pending, _ = line.strip().partition(" (PENDING: ")
            failed = re.fullmatch(r"(.*) \((?:FAILED|ERROR) - \d+\)", name)
            status = _SKIPPED if pending else _FAILED if failed else _PASSED
            found[_test_name(" ", groups[:depth], failed[1] if failed else name)] = status
    return found


def _karma(log: str) -> Statuses:
    """karma-mocha-reporter: the suites of a test, joined with ` > `."""
    found: Statuses = {}
    suites: list[str] = []
    depth, started = -1, False
    for line in lines_of(log):
        if line.startswith("SUMMARY:"):
            break
        if "Starting browser" in line:
            started = True
            continue
        match = re.match(r"(\s*)?([✔✖])?\s(.*)$", line) if started else None
        if match is None:
            continue
        indent, mark, name = match.groups()
        if indent and not mark:
            if len(indent) < depth:
                depth = len(indent)
                del suites[-1:]
                continue
            if len(indent) > depth and len(suites) < _MOST_LEVELS:
                suites.append(name)
            depth = len(indent)
        if mark:
            found[_test_name(" > ", suites, name)] = _PASSED if mark == "✔" else _FAILED
    return found


def _doctest(log: str) -> Statuses:
    """The XML of doctest (C++): a subcase passed if all its expressions did."""
    found: Statuses = {}
    for case in _elements(log, "<doctest", "</doctest>", "TestCase"):
        for sub in case.iter("SubCase"):
            right = all(expression.get("success") == "true" for expression in sub.iter("Expression"))
            found[_test_name(" > ", [case.get("name", "None")], sub.get("name", "None"))] = (
                _PASSED if right else _FAILED
            )
    return found


def _junit(log: str) -> Statuses:
    """JUnit's XML, which gradle, maven, ctest, pytest and many others write: `name (class)`."""
    found: Statuses = {}
    for case in _elements(log, "<testsuite", "</testsuite>", "testcase"):
        bad = any(case.find(tag) is not None for tag in ("failure", "error"))
        where = f" ({case.get('classname')})" if case.get("classname") else ""
        skipped = case.find("skipped") is not None
        found[f"{case.get('name')}{where}"] = _FAILED if bad else _SKIPPED if skipped else _PASSED
    return found


class _Shallow(ElementTree.TreeBuilder):
    """Refuses elements inside of elements of the same name beyond a depth, because each level is read again."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def start(self, tag: str, attrs: dict[str, str]) -> ElementTree.Element:
        self._depth += 1
        if self._depth > _MOST_LEVELS:
            raise ElementTree.ParseError(f"over {_MOST_LEVELS} levels")
        return super().start(tag, attrs)

    def end(self, tag: str) -> ElementTree.Element:
        self._depth -= 1
        return super().end(tag)


def _elements(log: str, start: str, end: str, tag: str) -> Iterator[ElementTree.Element]:
    """Yield the elements of the XML documents in a log. Documents that are torn, very deep or that define entities are
    left out."""
    at, log = 0, _ANSI.sub("", log)
    while (begin := log.find(start, at)) >= 0 and (last := log.find(end, begin)) >= 0:
        at = last + len(end)
        text = log[begin:at]
        if len(text) <= _MOST_XML and "<!" not in text.replace("<![CDATA[", ""):
            try:
                parser = ElementTree.XMLParser(target=_Shallow())  # noqa: S314  no entities: see above
                yield from ElementTree.fromstring(text, parser).iter(tag)  # noqa: S314
            except ElementTree.ParseError:
                continue


def _failures(pattern: str) -> Parser:
    """A log that lists only failed tests. Such rows have the evaluation type `fail_only`."""
    compiled = re.compile(pattern)

    def read(log: str) -> Statuses:
        names = (match[1] for line in lines_of(log) if (match := compiled.search(line)))
        return {" ".join(name.split()): _FAILED for name in names}

    return read


def _eslint(log: str) -> Statuses:
    """mocha's list of failures: the lines from a number to the line of the error are the name."""
    found: Statuses = {}
    name: list[str] | None = None
    for line in lines_of(log):
        if name is None:
            match = re.search(r"\s\s\d+\)(.*)", line)
            name = [match[1]] if match else None
        elif "Error" in line:
            found[" ".join(" ".join(name).split())] = _FAILED
            name = None
        else:
            name.append(line)
    return found


def _json_lines(log: str) -> Statuses:
    """`go test -json`."""
    found: Statuses = {}
    words = {"pass": _PASSED, "fail": _FAILED, "skip": _SKIPPED}
    for line in lines_of(log):
        action = re.search(r'"Action":"(pass|fail|skip)"', line)
        test = action and re.compile(r'"Test":"((?:[^"\\]|\\.)*)"').search(line, action.end())
        if action and test:
            found[test[1]] = words[action[1]]
    return found


def _either(*parsers: Parser) -> Parser:
    """The first of these parsers that finds a test."""

    def read(log: str) -> Statuses:
        return next((found for each in parsers if (found := each(log))), {})

    return read


PARSERS: Mapping[str, Parser] = {
    **LINES,
    "minitest": _minitest,
    "phpunit": _phpunit,
    "maven": _maven,
    "surefire": _surefire,
    "gradle_custom": _gradle,
    "mocha": _mocha,
    "lighthouse_mocha": _mocha,
    "karma": _karma,
    "doctest": _doctest,
    "junit": _junit,
    "gotest_json": _json_lines,
    "node": _either(_marks, LINES["tap"], LINES["jest_json"]),
    "java": _either(_junit, _gradle, _surefire, _maven),
    "rspec": _either(LINES["rspec_transformed_json"], _rspec),
    "ruby": _either(LINES["minitest_verbose"], LINES["ruby_unit"], _rspec),
    "c": _either(LINES["ctest"], LINES["googletest"], LINES["tap"], LINES["jq"]),
    **dict.fromkeys(("carbon", "react_pdf", "grommet"), LINES["test_files"]),
    "marked": _failures(r"^\d+\)\s(.*)$"),
    "eslint": _eslint,
    "chart_js": _failures(r"Chrome\s[\d.]+\s\([^()]+\)\s(.*)(?<=FAILED)$"),
}
"""Our parsers by name, without the prefix `parse_log_`."""

_ALIASES = {
    "js": "node", "js_2": "node", "js_3": "mocha", "js_4": "node", "ava": "node", "jasmine": "node",
    "java_mvn": "surefire", "java_mvn_v2": "surefire", "mvn": "surefire", "gradlew_v1": "junit",
    "gradle": "gradle_custom", "go": "gotest", "rust": "cargo", "cpp": "c", "cpp_v2": "c", "ctest_v1": "ctest",
    "gtest": "googletest", "php": "phpunit",
}  # fmt: skip
"""Names of the parsers of SWE-rebench V2 and SWE-bench-Live for the same formats."""


def short_name(name: str) -> str:
    """Return the name of a parser without the prefixes that data sets give it."""
    bare = re.sub(r"^parse_(?:log_)?", "", name.strip().lower().replace("-", "_"))
    return _ALIASES.get(bare, bare)


def parser(name: str, instance_id: str = "", version: str = "") -> Parser:
    """Return the log parser with this name. Logs are read without the colours of a terminal.

    `instance_id` and `version` choose among the formats of some parsers of `swebench`. Raises `TaskError` for an
    unknown parser.
    """
    if (found := PARSERS.get(short_name(name))) is not None:
        return found
    if name.strip() in _published():
        return functools.partial(_read_published, (name.strip(), instance_id, version))
    raise TaskError(
        f"log parser {name!r} is unknown; known parsers: {', '.join(sorted(PARSERS))}. The parsers of SWE-bench "
        f"for single repositories need its package: {install_command('swe')}"
    )


def has_run(log: str) -> bool:
    """Return whether a log shows that at least one test ran. A log that lists only failures needs this sign: without
    it, a session that never began would have no failure either."""
    return any(_RAN.search(line) for line in lines_of(log))


def counted(log: str) -> float | None:
    """Return an upper bound of the number of tests that passed by the summaries of runners in a log, or None if it has
    no summary: the session did not end by itself. Go's summaries count nothing."""
    found = [match for line in lines_of(log) if (match := _SUMMARY.search(line) or _GO_SUMMARY.match(line))]
    return sum(float(match[match.lastindex or 0] if match.lastindex else "inf") for match in found) if found else None


@functools.cache
def _published() -> frozenset[str]:
    """Return the names of SWE-bench's own parsers, if its package is installed."""
    if importlib.util.find_spec("swebench") is None:
        return frozenset()
    return frozenset(importlib.import_module("swebench.harness.log_parsers").PARSER_REGISTRY)


_IN_PROCESS = """
import json, sys, types
from swebench.harness.log_parsers import PARSER_REGISTRY
name, instance_id, version = sys.argv[1:]
spec = types.SimpleNamespace(instance_id=instance_id, version=version)
print(json.dumps(PARSER_REGISTRY[name](sys.stdin.read(), spec)))
"""


def _read_published(names: tuple[str, str, str], log: str) -> Statuses:
    """Read a log with a parser of `swebench` in a process of its own. A log that takes too long, or that the parser
    cannot read, lists no test."""
    # -P: the working directory, which may be a checkout of a task, must not provide a module `swebench`.
    argv, text = [sys.executable, "-P", "-c", _IN_PROCESS, *names], "\n".join(lines_of(log)).encode("utf-8", "replace")
    try:
        done = subprocess.run(argv, input=text, capture_output=True, timeout=_FOREIGN_S, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return {}
    return {test: _status_of_word(word) for test, word in json.loads(done.stdout.splitlines()[-1]).items()}


def _status_of_word(word: str) -> Status:
    return {"XFAIL": Status.XFAILED}.get(word) or Status(word.lower())
