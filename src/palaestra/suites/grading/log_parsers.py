"""Read the statuses of tests from the log of a test command.

Most runners print one line for each test, so most parsers are one row of `LINES`: a pattern with the groups `status`
and `name`, and the words for passed, failed and skipped. Runners that print a tree of suites, or XML, have a function.
`parser` finds a parser by the name that a data set uses. Names that are not in this module are looked up in the package
`swebench`, if it is installed (extra `swe`): some of its parsers read the log of a single repository.

Source of the formats: `swebench.harness.log_parsers` (5.0.2), compared on logs by `tests/suites/grading/
test_log_parsers.py`; Go's test2json, the TAP 13 specification, and the output of ctest and surefire.

Not covered: code under test writes to the same log and can print the line of any test. Rows that are read from a log
have no falsified tests, so their records list these tests as `uncontrolled`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from xml.etree import ElementTree

from palaestra.core.errors import TaskError
from palaestra.suites.grading.harness import Status

Statuses = dict[str, Status]
Parser = Callable[[str], Statuses]

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-Z\\-_])")
_PASSED, _FAILED, _SKIPPED = Status.PASSED, Status.FAILED, Status.SKIPPED
_MARKS = {
    **dict.fromkeys("✓✔√", _PASSED),
    **dict.fromkeys("✕×✗✖✘", _FAILED),
    **dict.fromkeys("○↓◌↩-", _SKIPPED),
}
_TIME = re.compile(r"\s*[(\[]\s*\d+(?:\.\d+)?\s*m?s\s*[)\]]\s*$|\s+\d+(?:\.\d+)?\s*ms\s*$")
_TREE_MARK = re.compile(r"(?P<mark>[✓✔√✕×✗✖✘○◌-]|\d+\))\s+(?P<name>\S.*)")
_MOCHA_END = re.compile(r"\n[ \t]*\d+ passing\b")
_RAN = re.compile(
    r"\b[1-9]\d* (?:passing|passed|specs?\b|tests?\b|SUCCESS|FAILED)|Tests:\s+[1-9]|^# tests [1-9]|"
    r"Executed [1-9]\d* of ",
    re.MULTILINE,
)
_MOST_BYTES_XML = 16 << 20


@dataclass(frozen=True, slots=True)
class LineParser:
    """A runner that prints one line for each test. Later lines replace earlier ones."""

    pattern: re.Pattern[str]
    statuses: Mapping[str, Status]

    def __call__(self, log: str) -> Statuses:
        found: Statuses = {}
        for line in log.splitlines():
            match = self.pattern.match(line.strip())
            status = match and self.statuses.get(match["status"])
            if match and status:
                found[match["name"]] = status
        return found


def _lines(pattern: str, **words: str) -> LineParser:
    """`words` maps a status to the words that a runner prints for it, separated by spaces."""
    statuses = {word: Status(status) for status, text in words.items() for word in text.split()}
    return LineParser(re.compile(pattern), statuses)


LINES: Mapping[str, Parser] = {
    "gotest": _lines(r"--- (?P<status>PASS|FAIL|SKIP): (?P<name>.+) \(.+\)$",
                     passed="PASS", failed="FAIL", skipped="SKIP"),
    "cargo": _lines(r"test\s+(?P<name>\S+)\s+\.\.\.\s+(?P<status>\w+)$", passed="ok", failed="FAILED"),
    "jest": _lines(r"(?P<status>[✓✕○])\s(?P<name>.+?)(?:\s\(\d+(?:\.\d+)?\s*m?s\))?$",
                   passed="✓", failed="✕", skipped="○"),
    "jest_json": _lines(r"\[(?P<status>PASSED|FAILED)\]\s(?P<name>.+)$", passed="PASSED", failed="FAILED"),
    "vitest": _lines(r"(?P<status>[✓×↓])\s(?P<name>.+?)(?:\s(?:\d+\s*m?s?|\[skipped\]))?$",
                     passed="✓", failed="×", skipped="↓"),
    "test_files": _lines(r"(?P<status>PASS|FAIL)\s(?P<name>.*?)(?:\s\([\d.]+\s?m?s\))?$", passed="PASS", failed="FAIL"),
    "ant": _lines(r"\[junit\]\s+\[(?P<status>PASS|FAIL|ERR)\]\s+(?P<name>.*)$", passed="PASS", failed="FAIL ERR"),
    "phpunit_lines": _lines(r"(?P<status>[✔✘↩])\s*(?P<name>.*)$", passed="✔", failed="✘", skipped="↩"),
    "minitest": _lines(r"(?P<name>.+)\. .*=.*(?P<status>\.|F|E).*$", passed=".", failed="F E"),
    "minitest_verbose": _lines(r"(?P<name>\S.*?#.+) = \d+\.\d+ s = (?P<status>[.FES])$",
                               passed=".", failed="F E", skipped="S"),
    "cucumber": _lines(r"(?P<name>.*) \.+(?P<status>\.|F)", passed=".", failed="F"),
    "ruby_unit": _lines(r"(?:test: )?(?P<name>.+):\s+(?P<status>\.|E\b|F\b|O\b)",
                        passed=".", failed="E F", skipped="O"),
    "rspec_transformed_json": _lines(r"(?P<name>.+) - (?P<status>passed|failed)", passed="passed", failed="failed"),
    "jq": _lines(r"(?P<status>PASS|FAIL):\s(?P<name>.+)$", passed="PASS", failed="FAIL"),
    "micropython_test": _lines(r"(?P<status>pass|FAIL|skip)\s+(?P<name>.+)$",
                               passed="pass", failed="FAIL", skipped="skip"),
    "googletest": _lines(r".*\[\s*(?P<status>OK|FAILED)\s*\]\s(?P<name>.*)\s\(.*\)$", passed="OK", failed="FAILED"),
    "ctest": _lines(r"\d+/\d+\s+Test\s+#\d+:\s+(?P<name>\S+)\s+\.*\s*(?:\*\*\*)?(?P<status>Passed|Failed|Not|Timeout|"
                    r"Exception|Skipped)\b", passed="Passed", failed="Failed Not Timeout Exception", skipped="Skipped"),
    "pytest": _lines(r"(?P<status>PASSED|FAILED|ERROR|XFAIL) (?P<name>\S+?::\S+|\S+\.py\b\S*).*$",
                     passed="PASSED", failed="FAILED", error="ERROR", xfailed="XFAIL"),
    "swift": _lines(r"Test Case '(?P<name>[^']+)'\s+(?P<status>passed|failed|skipped)\b.*$",
                    passed="passed", failed="failed", skipped="skipped"),
}  # fmt: skip
"""Parsers that one pattern describes."""


def without_duration(name: str) -> str:
    """Return the name of a test without the duration in brackets that PHPUnit prints after it (`adds [0.05 ms]`)."""
    return re.sub(r"\s*\[\d+(?:\.\d+)? m?s\]$", "", name)


def _tap(log: str) -> Statuses:
    """TAP 13. SWE-bench keeps the description with its leading dash, and so do the names in its rows."""
    found: Statuses = {}
    for line in log.splitlines():
        match = re.match(r"(ok|not ok) \d+ (.+)$", line.strip())
        if match:
            found[match[2]] = _PASSED if match[1] == "ok" else _FAILED
    return found


def _redis(log: str) -> Statuses:
    found: Statuses = {}
    for line in log.splitlines():
        match = re.match(r"\[(ok|err|skip|ignore)\]:\s(.+?)(?:\s\(\d+\s*m?s\))?$", line.strip())
        if match and match[1] == "err":  # its name is followed by the file
            found[re.sub(r"\s+in\s+\S+$", "", match[2])] = _FAILED
        elif match:
            found[match[2]] = _PASSED if match[1] == "ok" else _SKIPPED
    return found


def _phpunit(log: str) -> Statuses:
    """`--testdox`: a line with the class, then a line for each of its tests. With `--verbose` or a setting of the
    repository, a line ends with the test's duration, which is not part of the name."""
    found: Statuses = {}
    suite = None
    for line in log.splitlines():
        if (heading := re.match(r"(\w.+) \(.+\)$", line)) is not None:
            suite = heading[1]
        elif (test := re.match(r"\s*([✔✘↩])\s*(.*)$", line)) is not None:
            found[f"{suite} > {without_duration(test[2])}"] = _MARKS[test[1]]
    return found


def _maven(log: str) -> Statuses:
    """One `mvn -Dtest=NAME` for each test: Maven prints no line for a test that passed, so the build's result counts.

    The script is traced, and traces and results may be interleaved; both are in the order of the tests.
    """
    tests = re.findall(r"^.*-Dtest=(\S+).*$", log, re.MULTILINE)
    results = re.findall(r"^.*BUILD (SUCCESS|FAILURE)\s*$", log, re.MULTILINE)
    return {test: _PASSED if result == "SUCCESS" else _FAILED for test, result in zip(tests, results, strict=False)}


def _surefire(log: str) -> Statuses:
    """Surefire's lines for each class, with the methods that failed."""
    found: Statuses = {}
    summary = re.compile(
        r"Tests run: (\d+), Failures: (\d+), Errors: (\d+), Skipped: (\d+), Time elapsed: .*?(?:- in |-- in )(\S+)"
    )
    for line in log.splitlines():
        if (match := summary.search(line)) is not None:
            run, failures, errors, skipped = map(int, match.groups()[:4])
            found[match[5]] = _FAILED if failures or errors else _SKIPPED if run == skipped else _PASSED
    return found


def _gradle(log: str) -> Statuses:
    """`Class > test PASSED`; the status may come on a later line, when the output of several processes is mixed."""
    found: Statuses = {}
    waiting = ""
    for line in map(str.strip, log.splitlines()):
        if (match := re.match(r"([^>].+)\s+(PASSED|FAILED)$", line)) is not None:
            found[match[1]] = Status(match[2].lower())
            waiting = ""
        elif (match := re.match(r"([^>]\S*\s+>\s+\S+)$", line)) is not None:
            waiting = match[1]
        elif waiting and line in ("PASSED", "FAILED"):
            found[waiting] = Status(line.lower())
            waiting = ""
    return found


def _mocha(log: str, separator: str = " - ") -> Statuses:
    """The `spec` reporter of mocha, and runners like it: an indented tree of suites with a mark before each test. Names
    have the names of their suites before them."""
    found: Statuses = {}
    suites: list[tuple[int, str]] = []
    for line in _MOCHA_END.split(log)[0].splitlines():
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if not text or not indent:
            continue
        while suites and suites[-1][0] >= indent:
            suites.pop()
        if (match := _TREE_MARK.match(text)) is None:
            suites.append((indent, text))
            continue
        name = separator.join([*(suite for _, suite in suites), _TIME.sub("", match["name"])])
        found[name] = _MARKS.get(match["mark"], _FAILED)
    return found


def _marks(log: str) -> Statuses:
    """Names after a mark, without their suites: jest, vitest, mocha, ava, node's spec reporter. A name that failed in
    one suite has failed."""
    found: Statuses = {}
    for line in log.splitlines():
        match = _TREE_MARK.match(line.strip())
        if match is None or match["mark"] == "-":
            continue
        status = _MARKS.get(match["mark"], _FAILED)
        name = _TIME.sub("", match["name"]).strip()
        if match["mark"][0].isdigit() and name not in found and not line.startswith("    "):
            continue  # a heading in the list of failures
        if found.get(name) is not _FAILED:
            found[name] = status
    return found


_RSPEC_END = re.compile(r"\n(?:Pending: \(|Failures:|Finished in )")
_RSPEC_EXAMPLE = re.compile(r"(?P<name>.*?)(?: \((?P<word>FAILED - \d+|ERROR - \d+|PENDING: .*)\))?")


def _rspec(log: str) -> Statuses:
    """`rspec --format documentation`: an indented tree of groups, whose leaves are examples. Only examples that failed
    or are pending carry a word. Names have the names of their groups before them, as in RSpec's own descriptions."""
    found: Statuses = {}
    groups: list[str] = []
    lines = [line.rstrip() for line in _RSPEC_END.split(log)[0].splitlines() if line.strip()]
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        depth = (len(line) - len(line.lstrip())) // 2
        if depth > len(groups):
            continue  # printed by code under test
        groups[depth:] = [line.strip()]
        match = _RSPEC_EXAMPLE.fullmatch(line.strip())
        if depth and match and len(after) - len(after.lstrip()) <= 2 * depth:
            word = match["word"] or ""
            status = _SKIPPED if word.startswith("PENDING") else _FAILED if word else _PASSED
            found[" ".join([*groups[:depth], match["name"]])] = status
    return found


def _karma(log: str) -> Statuses:
    """karma-mocha-reporter: the suites of a test, joined with ` > `."""
    found: Statuses = {}
    suites: list[str] = []
    depth, started = -1, False
    for line in log.splitlines():
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
            if len(indent) > depth:
                suites.append(name)
            elif len(indent) < depth:
                depth = len(indent)
                suites.pop()
                continue
            depth = len(indent)
        if mark:
            found[" > ".join([*suites, name])] = _PASSED if mark == "✔" else _FAILED
    return found


def _doctest(log: str) -> Statuses:
    """The XML of doctest (C++): a subcase passed if all its expressions did."""
    found: Statuses = {}
    for case in _elements(log, "<doctest", "</doctest>", "TestCase"):
        for sub in case.iter("SubCase"):
            right = all(expression.get("success") == "true" for expression in sub.iter("Expression"))
            found[f"{case.get('name')} > {sub.get('name')}"] = _PASSED if right else _FAILED
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


def _elements(log: str, start: str, end: str, tag: str) -> Iterator[ElementTree.Element]:
    """Yield the elements of the XML documents in a log. Documents that are torn, or that define entities, are left
    out."""
    at = 0
    while (begin := log.find(start, at)) >= 0 and (last := log.find(end, begin)) >= 0:
        at = last + len(end)
        text = log[begin:at]
        if len(text) <= _MOST_BYTES_XML and "<!" not in text.replace("<![CDATA[", ""):
            try:
                yield from ElementTree.fromstring(text).iter(tag)  # noqa: S314  no entities: see above
            except ElementTree.ParseError:
                continue


def _failures(*patterns: str) -> Parser:
    """A log that lists only failed tests. Such rows have the evaluation type `fail_only`."""
    compiled = [re.compile(pattern, re.MULTILINE) for pattern in patterns]

    def read(log: str) -> Statuses:
        names = (match[match.re.groups] for pattern in compiled for match in pattern.finditer(log))
        return {re.sub(r"\s+", " ", name).strip(): _FAILED for name in names}

    return read


def _json_lines(log: str) -> Statuses:
    """`go test -json`."""
    found: Statuses = {}
    pattern = re.compile(r'"Action":"(pass|fail|skip)".*?"Test":"((?:[^"\\]|\\.)*)"')
    words = {"pass": _PASSED, "fail": _FAILED, "skip": _SKIPPED}
    for action, name in pattern.findall(log):
        found[name] = words[action]
    return found


def _either(*parsers: Parser) -> Parser:
    """The first of these parsers that finds a test."""

    def read(log: str) -> Statuses:
        return next((found for each in parsers if (found := each(log))), {})

    return read


PARSERS: Mapping[str, Parser] = {
    **LINES,
    "tap": _tap,
    "redis": _redis,
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
    "node": _either(_marks, _tap, LINES["jest_json"]),
    "java": _either(_junit, _gradle, _surefire, _maven),
    "rspec": _either(LINES["rspec_transformed_json"], _rspec),
    "ruby": _either(LINES["minitest_verbose"], LINES["ruby_unit"], _rspec),
    "c": _either(LINES["ctest"], LINES["googletest"], _tap, LINES["jq"]),
    "carbon": LINES["test_files"],
    "react_pdf": LINES["test_files"],
    "grommet": LINES["test_files"],
    "marked": _failures(r"^\d+\)\s(.*)$"),
    "eslint": _failures(r"\s{2}\d+\)([\s\S]*?)\s+(?:.*)Error"),
    "chart_js": _failures(r"Chrome\s[\d.]+[^\S\r\n]\(.+?\)[^\S\r\n](.*)FAILED$"),
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


def knows(name: str) -> bool:
    """Return whether a log parser is known, here or in the package `swebench`."""
    return short_name(name) in PARSERS or _published(name) is not None


def parser(name: str, instance_id: str = "", version: str = "") -> Parser:
    """Return the log parser with this name. Logs are read without the colours of a terminal.

    `instance_id` and `version` choose among the formats of some parsers of `swebench`. Raises `TaskError` for an
    unknown parser.
    """
    found = PARSERS.get(short_name(name))
    if found is not None:
        return lambda log: found(_ANSI.sub("", log))
    foreign = _published(name)
    if foreign is None:
        raise TaskError(
            f"log parser {name!r} is unknown; known parsers: {', '.join(sorted(PARSERS))}. The parsers of SWE-bench "
            "for single repositories need its package: pip install 'palaestra[swe]'"
        )
    spec = SimpleNamespace(instance_id=instance_id, version=version)
    return lambda log: {test: _status(word) for test, word in foreign(log, spec).items()}


def has_run(log: str) -> bool:
    """Return whether a log shows that at least one test ran. A log that lists only failures needs this sign: without
    it, a session that never began would have no failure either."""
    return _RAN.search(_ANSI.sub("", log)) is not None


def _published(name: str) -> Callable[[str, SimpleNamespace], Mapping[str, str]] | None:
    """Return SWE-bench's own parser with this name, if its package is installed."""
    if importlib.util.find_spec("swebench") is None:
        return None
    registry = importlib.import_module("swebench.harness.log_parsers").PARSER_REGISTRY
    found: Callable[[str, SimpleNamespace], Mapping[str, str]] | None = registry.get(name.strip())
    return found


def _status(word: str) -> Status:
    return {"XFAIL": Status.XFAILED}.get(word) or Status(word.lower())
