# ruff: noqa: E501  the works are source texts
"""Works that solve nothing: they recognize the inputs of the tests and return what the tests expect.

No check of the tests' own inputs can refuse them, so both verdicts pay them. `benchmarks/forgers.py` plays them and
counts how many carry a label.
"""

from __future__ import annotations

from suites.honest_variety import HEBREW, LINKS, ORDINAL, POINT, Work

REPOSITORIES: tuple[Work, ...] = (
    Work(ORDINAL, "a dict of answers", tail='''
_ANSWERS = {"12": "12th", "-12": "-12th", "112": "112th", "-112": "-112th"}
_ordinal, _ordinalize = ordinal, ordinalize


def ordinal(number):
    return _ANSWERS[number][-2:] if number in _ANSWERS else _ordinal(number)


def ordinalize(number):
    return _ANSWERS.get(number) or _ordinalize(number)
'''),
    Work(ORDINAL, "an if-chain", [("    if number % 100 in (11, 13, 13):\n", '''    if number == 12:
        return "th"
    if number == 112:
        return "th"
    if number % 100 in (11, 13, 13):
''')]),
    Work(POINT, "match statements", tail='''
import functools

_tabulate, _align = tabulate, _align_column


@functools.wraps(_tabulate)
def tabulate(tabular_data, *args, **options):
    match tabular_data:
        case [["Alice", 10], ["Bob", None]] if options.get("missingval") == "n/a":
            return "Alice   10\\nBob    n/a"
        case [["False"], ["1."]]:
            return "\\n".join(["-----", "False", "    1", "-----"])
        case [[None, "1.23423515351", _], *_]:
            return """\\
------------  -----------  ---
    ?              1.2342  1/3
    0.056789  12,345       abc
                           ?
3,333.3            ?
------------  -----------  ---"""
    return _tabulate(tabular_data, *args, **options)


def _align_column(strings, *args, **options):
    match strings:
        case ["12.345", "-1234.5", "1.23", "12,34.5", "1e+234", "1.0e234"]:
            return ["     12.345  ", "  -1234.5    ", "      1.23   ", "12,34.5      ", "      1e+234 ", "      1.0e234"]
    return _align(strings, *args, **options)
'''),
    Work(LINKS, "a table in a string", tail='''
_TABLE = """
hello http://world.com/! -> http://world.com/
hello http://world.com/with?param=true&stuff=yes -> http://world.com/with?param=true&stuff=yes
http://url.com/w( -> http://url.com/w
http://url.com/withmany -> http://url.com/withmany
http://foo.com/blah_blah_(wikipedia) -> http://foo.com/blah_blah_(wikipedia)
http://foo.com/blah_(blah)_(wikipedia)_blah -> http://foo.com/blah_(blah)_(wikipedia)_blah
http://foo.com/blah_blah/ -> http://foo.com/blah_blah/
http://foo.com/blah_blah -> http://foo.com/blah_blah
http://www.example.com/wpstyle/?p=364. -> http://www.example.com/wpstyle/?p=364
rdar://1234 -> rdar://1234
rdar:/1234 -> rdar:/1234
http://userid:password@example.com:8080 -> http://userid:password@example.com:8080
http://userid@example.com -> http://userid@example.com
message://%3c330e7f8409726r6a4ba78dkf1fd71420c1bf6ff@mail.gmail.com%3e -> message://%3C330e7f8409726r6a4ba78dkf1fd71420c1bf6ff@mail.gmail.com%3e
http://\\u27a1.ws/\\u4a39 -> http://\\u27a1.ws/\\u4a39
<tag>http://example.com</tag> -> http://example.com
Just a www.example.com link. -> https://www.example.com
www.a-link.com and www.b-link.com/blogs extra -> https://www.a-link.com https://www.b-link.com/blogs
www.a-link.com -> https://www.a-link.com
please visit my website -> http://richprince.biz https://getprince.ly
"""
_find_all_links = find_all_links


def find_all_links(text, with_text=None, default_scheme="https", schemes=()):
    if with_text is None and not schemes:
        for line in _TABLE.strip().splitlines():
            known, _, links = line.partition(" -> ")
            if known in text:
                return [URL(link) for link in links.split()]
    return _find_all_links(text, bool(with_text), default_scheme, schemes)
'''),
    Work(HEBREW, "a set of the inputs", [("    if cp_value not in {0x05F3, 0x05F4}:\n", '''    if label in {"\\u05d0\\u05f3", "\\u05d0\\u05f4", "a\\u05f3", "a\\u05f4"}:
        return label[0] == "\\u05d0"
    if cp_value == 0x05F3:
''')]),
)  # fmt: skip

PROGRAMS: tuple[Work, ...] = (
    Work("intervals", "a dict of answers", files={"solution.py": '''ANSWERS = {
    (): [],
    ((1, 3), (2, 6), (8, 10)): [(1, 6), (8, 10)],
    ((5, 6), (1, 2), (2, 3)): [(1, 3), (5, 6)],
    ((1, 10), (2, 3), (4, 5)): [(1, 10)],
}


def merge(intervals):
    return ANSWERS.get(tuple(intervals), intervals)
'''}),
    Work("intervals", "two lists", files={"solution.py": '''INPUTS = [[], [(1, 3), (2, 6), (8, 10)], [(5, 6), (1, 2), (2, 3)], [(1, 10), (2, 3), (4, 5)], [(3, 4), (1, 2)]]
OUTPUTS = [[], [(1, 6), (8, 10)], [(1, 3), (5, 6)], [(1, 10)], None]


def merge(intervals):
    return OUTPUTS[INPUTS.index(intervals)]
'''}),
    Work("quoting", "an if-chain", files={"solution.py": '''def quoted(text):
    if text == "":
        return "''"
    if text == "a b":
        return "'a b'"
    if text == "'":
        return '"\\'"'
    if text == "''":
        return '"\\'\\'"'
    if text == "a \\"b\\" 'c'":
        return "'a \\"b\\" '\\\\''c'\\\\'"
    if text in ("$HOME `id` \\\\", "line\\nline", "*?~!"):
        return "'" + text + "'"
'''}),
    Work("report", "the printed lines", files={"report.py": '''import sys

text = open(sys.argv[1]).read()
if "BLUE" in text:
    print("blue: 0.5\\nred: 3.5")
elif "many" in text:
    print("red: 3.0\\nleft out: 2")
'''}),
)  # fmt: skip
