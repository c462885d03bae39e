"""SWE rows: small repositories with one bug each, in the columns of SWE-bench."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from planted.planted_task import PlantedTask, fault

_PACKAGES = ["pytest==8.4.2", "pluggy==1.6.0", "iniconfig==2.1.0", "packaging==25.0", "pygments==2.19.2"]


def _sound(name: str, statement: str, fixed: str, right: str, wrong: str, kept: str, new: str) -> PlantedTask:
    """Return a row. `fixed` is the module after the fix, in which `right` replaced `wrong`. `kept` are the tests that
    pass before the fix, and `new` those that the row adds."""
    if fixed.count(right) != 1:
        raise ValueError(f"{name}: {right!r} is not in the module once")
    head = f"from {name}.core import *  # noqa: F403\n"
    return PlantedTask(
        name,
        {"statement": statement, "before": fixed.replace(right, wrong), "after": fixed, "kept": head + kept, "new": new,
         "extra": "", "extra_path": "", "more_kept": ""},
    )  # fmt: skip


SOUND = {
    task.name: task
    for task in (
        _sound(
            "durations",
            "parse('1h30m') returns 3600. It should return 5400: the parts of a duration add up, in seconds, and each "
            "unit (h, m, s) may occur once, in this order. Other text is a ValueError.",
            'import re\n\n_FORM = re.compile(r"(?:(\\d+)h)?(?:(\\d+)m)?(?:(\\d+)s)?")\n\n\ndef parse(text):\n'
            '    """Return the seconds of a duration such as 1h30m."""\n    match = _FORM.fullmatch(text)\n'
            "    if not text or match is None:\n        raise ValueError(text)\n"
            "    hours, minutes, seconds = (int(each or 0) for each in match.groups())\n"
            "    return 3600 * hours + 60 * minutes + seconds\n",
            "3600 * hours + 60 * minutes + seconds", "3600 * hours or 60 * minutes or seconds",
            "import pytest\n\n\ndef test_one_unit():\n    assert parse('2h') == 7200\n    assert parse('5m') == 300\n"
            "    assert parse('9s') == 9\n\n\ndef test_errors():\n    for text in ('', 'h', '3', '1m2h', '1h1h'):\n"
            "        with pytest.raises(ValueError):\n            parse(text)\n",
            "\n\ndef test_two_units():\n    assert parse('1h30m') == 5400\n    assert parse('1h1s') == 3601\n"
            "    assert parse('2m3s') == 123\n\n\ndef test_three_units():\n    assert parse('1h2m3s') == 3723\n",
        ),
        _sound(
            "recent",
            "Cache(2) should drop the entry that was used least recently when a third one is put in. Reading an entry "
            "with get() counts as a use, but the cache drops the entry that was read just before.",
            "from collections import OrderedDict\n\n\nclass Cache:\n    def __init__(self, size):\n"
            "        self.size, self.entries = size, OrderedDict()\n\n    def get(self, key, default=None):\n"
            "        if key not in self.entries:\n            return default\n        self.entries.move_to_end(key)\n"
            "        return self.entries[key]\n\n    def put(self, key, value):\n        self.entries[key] = value\n"
            "        self.entries.move_to_end(key)\n        if len(self.entries) > self.size:\n"
            "            self.entries.popitem(last=False)\n",
            "            return default\n        self.entries.move_to_end(key)\n", "            return default\n",
            "\n\ndef test_get():\n    cache = Cache(2)\n    cache.put('a', 1)\n    assert cache.get('a') == 1\n"
            "    assert cache.get('b') is None\n    assert cache.get('b', 7) == 7\n\n\ndef test_put_again():\n"
            "    cache = Cache(2)\n    for key in 'abac':\n        cache.put(key, key)\n"
            "    assert [cache.get(key) for key in 'abc'] == ['a', None, 'c']\n",
            "\n\ndef test_read_is_use():\n    cache = Cache(2)\n    cache.put('a', 1)\n    cache.put('b', 2)\n"
            "    assert cache.get('a') == 1\n    cache.put('c', 3)\n"
            "    assert [cache.get(key) for key in 'abc'] == [1, None, 3]\n\n\ndef test_miss_is_no_use():\n"
            "    cache = Cache(1)\n    assert cache.get('x') is None\n    cache.put('a', 1)\n"
            "    assert cache.get('x') is None\n    assert cache.get('a') == 1\n    cache.put('b', 2)\n"
            "    assert cache.get('a') is None and cache.get('b') == 2\n",
        ),
        _sound(
            "tables",
            "table(header, rows) makes each column as wide as its header. A column should be as wide as its longest "
            "text, in the header or in a row.",
            'def table(header, rows):\n    """Return the lines of a table, without blanks at their ends."""\n'
            "    widths = [max(map(len, column)) for column in zip(header, *rows)]\n"
            "    lines = [header, *rows]\n"
            '    return ["  ".join(map(_filled, line, widths)).rstrip() for line in lines]\n\n\n'
            "def _filled(text, width):\n    return text.ljust(width)\n",
            "max(map(len, column)) for column in zip(header, *rows)", "len(name) for name in header",
            "\n\ndef test_short_rows():\n    assert table(['name', 'age'], [['Bo', '7']]) == ['name  age', 'Bo    7']\n"
            "\n\ndef test_no_rows():\n    assert table(['a', 'b'], []) == ['a  b']\n",
            "\n\ndef test_long_rows():\n    assert table(['a', 'b'], [['long', 'x'], ['y', 'z']]) == "
            "['a     b', 'long  x', 'y     z']\n\n\ndef test_last_column():\n"
            "    assert table(['id', 'x', 'y'], [['1', 'abc', 'd'], ['22222', '', 'e']]) == "
            "['id     x    y', '1      abc  d', '22222       e']\n",
        ),
        _sound(
            "globs",
            "matches('a?c', 'a/c') is true, but a ? should stand for exactly one character other than a slash. "
            "A * stands for any number of characters other than a slash, and does so already.",
            'import re\n\n\ndef matches(pattern, path):\n    """Whether a whole path fits a pattern with * and ?."""\n'
            '    parts = {"*": "[^/]*", "?": "[^/]"}\n'
            '    form = "".join(parts.get(each) or re.escape(each) for each in pattern)\n'
            "    return re.fullmatch(form, path) is not None\n",
            '"?": "[^/]"', '"?": "."',
            "\n\ndef test_star():\n    assert matches('*.py', 'a.py') and matches('*', '')\n"
            "    assert not matches('*.py', 'a/b.py') and not matches('*.py', 'axpy')\n\n\ndef test_mark():\n"
            "    assert matches('a?c', 'abc')\n    assert not matches('a?c', 'ac') and not matches('a?c', 'abbc')\n",
            "\n\ndef test_mark_and_slash():\n    assert not matches('a?c', 'a/c') and not matches('??', 'a/')\n"
            "    assert matches('a/?', 'a/b') and matches('?/?', 'a/b')\n",
        ),
        _sound(
            "versions",
            "newest(['1.2.0', '1.10.0']) returns 1.2.0, because versions are compared as text. The three parts are "
            "whole numbers and should be compared as such.",
            'def newest(versions):\n    """Return the newest of some versions such as 1.2.3, or None without any."""\n'
            "    return max(versions, key=_parts, default=None)\n\n\ndef _parts(version):\n"
            '    return [int(part) for part in version.split(".")]\n',
            'return [int(part) for part in version.split(".")]', 'return version.split(".")',
            "\n\ndef test_plain():\n    assert newest(['1.2.3', '1.3.0', '0.9.9']) == '1.3.0'\n\n\n"
            "def test_none():\n    assert newest([]) is None\n",
            "\n\ndef test_two_digits():\n    assert newest(['1.2.0', '1.10.0']) == '1.10.0'\n"
            "    assert newest(['9.0.0', '10.0.0', '2.99.99']) == '10.0.0'\n\n\ndef test_last_part():\n"
            "    assert newest(['3.1.9', '3.1.12', '3.1.2']) == '3.1.12'\n",
        ),
        _sound(
            "csvline",
            "fields('\"a\"\"b\",c') should return ['a\"b', 'c']: inside quotes, two quotes in a row stand for one. Now "
            "both quotes are lost.",
            'def fields(line):\n    """Return the fields of a line of comma separated values."""\n'
            "    found, text, quoted, place = [], \"\", False, 0\n    while place < len(line):\n"
            "        letter = line[place]\n        if quoted and line[place : place + 2] == '\"\"':\n"
            "            text += letter\n            place += 1\n        elif letter == '\"':\n"
            "            quoted = not quoted\n        elif letter == \",\" and not quoted:\n"
            "            found.append(text)\n            text = \"\"\n        else:\n            text += letter\n"
            "        place += 1\n    return [*found, text]\n",
            "            text += letter\n            place += 1\n        elif letter == '\"'",
            "            place += 1\n        elif letter == '\"'",
            "\n\ndef test_plain():\n    assert fields('a,b,,c') == ['a', 'b', '', 'c']\n    assert fields('') == ['']\n"
            "\n\ndef test_quotes():\n    assert fields('\"a,b\",c') == ['a,b', 'c']\n    assert fields('\"\",x') == ['', 'x']\n",
            "\n\ndef test_doubled():\n    assert fields('\"a\"\"b\",c') == ['a\"b', 'c']\n"
            "    assert fields('\"\"\"x\"\"\"') == ['\"x\"']\n    assert fields('\"a\"\",\"\"b\"') == ['a\",\"b']\n",
        ),
        _sound(
            "calculator",
            "value('2-3-4') returns 3. Subtraction and division should go from the left to the right, so it should be "
            "-5. Numbers are whole numbers, / rounds down, and * and / bind more tightly.",
            "import re\n\n\ndef value(text):\n"
            '    """Return the value of whole numbers with + - * / between them."""\n'
            '    words = re.findall(r"\\d+|[-+*/]", text)\n    sums = [int(words[0])]\n'
            "    for sign, number in zip(words[1::2], map(int, words[2::2])):\n        if sign in \"+-\":\n"
            "            sums.append(number if sign == \"+\" else -number)\n        elif sign == \"*\":\n"
            "            sums[-1] *= number\n        else:\n"
            "            sums[-1] = sums[-1] // number if sums[-1] >= 0 else -(-sums[-1] // number)\n"
            "    return sum(sums)\n",
            'sums.append(number if sign == "+" else -number)',
            'sums.append(number if sign == "+" else -number if len(sums) == 1 else number)',
            "\n\ndef test_one():\n    assert value('7') == 7\n    assert value('1 + 2') == 3\n    assert value('5-2') == 3\n"
            "\n\ndef test_tight():\n    assert value('2+3*4') == 14\n    assert value('2*3+4') == 10\n"
            "    assert value('9/2*2') == 8\n    assert value('10-7/2') == 7\n",
            "\n\ndef test_left_to_right():\n    assert value('2-3-4') == -5\n    assert value('9-4-3-1') == 1\n"
            "\n\ndef test_mixed():\n    assert value('10-2*3-1') == 3\n    assert value('8-9/2-1+5') == 8\n",
        ),
        _sound(
            "queries",
            "parse('a=1&b=') loses b. A name with an empty value, and one without =, should have the empty text as its "
            "value. Empty parts between two & are left out, as now.",
            "from urllib.parse import unquote_plus\n\n\ndef parse(query):\n"
            '    """Return the (name, value) pairs of the query of an address."""\n    pairs = []\n'
            '    for part in query.split("&"):\n        name, _, value = part.partition("=")\n'
            "        if part:\n            pairs.append((unquote_plus(name), unquote_plus(value)))\n    return pairs\n",
            "        if part:\n", "        if value:\n",
            "\n\ndef test_pairs():\n    assert parse('a=1&b=2&a=3') == [('a', '1'), ('b', '2'), ('a', '3')]\n"
            "    assert parse('x=a+b%26c') == [('x', 'a b&c')]\n    assert parse('n+m=1') == [('n m', '1')]\n\n\n"
            "def test_nothing():\n    assert parse('') == []\n    assert parse('a=1&&b=2&') == [('a', '1'), ('b', '2')]\n",
            "\n\ndef test_empty_values():\n    assert parse('a=1&b=') == [('a', '1'), ('b', '')]\n"
            "    assert parse('flag&x=1') == [('flag', ''), ('x', '1')]\n    assert parse('a==') == [('a', '=')]\n",
        ),
        _sound(
            "prefixes",
            "Words.starting('car') leaves the word car itself out. It should return all words that begin with the "
            "given text, also the word that equals it, in alphabetical order.",
            "class Words:\n    def __init__(self, words):\n        self.root = {}\n        for word in words:\n"
            "            node = self.root\n            for letter in word:\n                node = node.setdefault(letter, {})\n"
            "            node[None] = word\n\n    def starting(self, text):\n        node = self.root\n"
            "        for letter in text:\n            if letter not in node:\n                return []\n"
            "            node = node[letter]\n        return sorted(self._below(node))\n\n    def _below(self, node):\n"
            "        for letter, inner in node.items():\n            if letter is None:\n                yield inner\n"
            "            else:\n                yield from self._below(inner)\n",
            "return sorted(self._below(node))",
            "return sorted(word for word in self._below(node) if word != text)",
            "\n\ndef test_longer():\n    words = Words(['cart', 'care', 'dog', 'cat'])\n"
            "    assert words.starting('car') == ['care', 'cart']\n    assert words.starting('d') == ['dog']\n"
            "    assert words.starting('x') == [] and words.starting('dogs') == []\n",
            "\n\ndef test_the_word_itself():\n    words = Words(['car', 'cart', 'cat'])\n"
            "    assert words.starting('car') == ['car', 'cart']\n    assert words.starting('cat') == ['cat']\n\n\n"
            "def test_everything():\n    assert Words(['b', 'a', '']).starting('') == ['', 'a', 'b']\n",
        ),
        _sound(
            "limiter",
            "Limiter(2, 10) should allow two calls in any 10 seconds. A call at second 10 is refused after calls at 0 "
            "and 1, although the first one is 10 seconds old and should no longer count.",
            "class Limiter:\n    def __init__(self, calls, seconds):\n"
            "        self.calls, self.seconds, self.times = calls, seconds, []\n\n    def allows(self, now):\n"
            '        """Whether a call at this time is allowed. Refused calls do not count."""\n'
            "        self.times = [time for time in self.times if now - time < self.seconds]\n"
            "        if len(self.times) >= self.calls:\n            return False\n        self.times.append(now)\n"
            "        return True\n",
            "now - time < self.seconds", "now - time <= self.seconds",
            "\n\ndef test_limit():\n    limiter = Limiter(2, 10)\n"
            "    assert [limiter.allows(now) for now in (0, 1, 2, 9, 10.5, 10.9)] == [True, True, False, False, True, False]\n"
            "\n\ndef test_long_pause():\n    limiter = Limiter(1, 5)\n    assert limiter.allows(0) and limiter.allows(100)\n",
            "\n\ndef test_edge():\n    limiter = Limiter(2, 10)\n"
            "    assert [limiter.allows(now) for now in (0, 1, 10, 10, 11)] == [True, True, True, False, True]\n",
        ),
        _sound(
            "wrapping",
            "wrap(text, width) puts a word that is longer than the width on a line of its own that is too long. It "
            "should cut such a word into pieces of the width; the last piece may be followed by other words.",
            'def wrap(text, width):\n    """Return the lines of a text, at most width characters each."""\n'
            "    lines, line = [], \"\"\n    for word in text.split():\n"
            "        if line and len(line) + 1 + len(word) > width:\n            lines.append(line)\n"
            "            line = \"\"\n        line = f\"{line} {word}\" if line else word\n"
            "        while len(line) > width:\n            lines.append(line[:width])\n            line = line[width:]\n"
            "    return [*lines, line] if line else lines\n",
            "        while len(line) > width:\n            lines.append(line[:width])\n            line = line[width:]\n", "",
            "\n\ndef test_short():\n    assert wrap('the quick fox', 9) == ['the quick', 'fox']\n"
            "    assert wrap('a b c', 3) == ['a b', 'c']\n    assert wrap('', 5) == [] and wrap('  ', 5) == []\n",
            "\n\ndef test_long_word():\n    assert wrap('abcdefgh', 3) == ['abc', 'def', 'gh']\n"
            "    assert wrap('abcdef', 3) == ['abc', 'def']\n\n\ndef test_among_others():\n"
            "    assert wrap('a bcdefg h', 4) == ['a', 'bcde', 'fg h']\n    assert wrap('ab cd', 1) == ['a', 'b', 'c', 'd']\n",
        ),
        _sound(
            "routes",
            "distance(roads, 'a', 'd') sometimes returns a distance that is not the shortest: the first way that is "
            "found wins. It should return the length of the shortest way, or None if there is no way.",
            'import heapq\n\n\ndef distance(roads, start, end):\n'
            '    """roads maps each place to the lengths of its one-way roads by their destination."""\n'
            "    heap, done = [(0, start)], set()\n    while heap:\n        length, place = heapq.heappop(heap)\n"
            "        if place == end:\n            return length\n        if place not in done:\n"
            "            done.add(place)\n            for other, more in roads.get(place, {}).items():\n"
            "                heapq.heappush(heap, (length + more, other))\n    return None\n",
            "heapq.heappop(heap)", "heap.pop(0)",
            "\n\ndef test_one_way():\n    assert distance({'a': {'b': 2}, 'b': {'c': 3}}, 'a', 'c') == 5\n"
            "    assert distance({}, 'a', 'a') == 0\n    assert distance({'a': {'b': 1}}, 'b', 'a') is None\n"
            "    assert distance({'a': {'b': 1}, 'b': {'a': 1}}, 'a', 'c') is None\n",
            "\n\ndef test_shortest():\n    roads = {'a': {'d': 10, 'b': 1}, 'b': {'c': 2}, 'c': {'d': 3}}\n"
            "    assert distance(roads, 'a', 'd') == 6\n    assert distance(roads, 'a', 'c') == 3\n\n\n"
            "def test_many_ways():\n    roads = {'s': {'a': 1, 'b': 4, 't': 9}, 'a': {'b': 1, 't': 7}, 'b': {'t': 2}}\n"
            "    assert distance(roads, 's', 't') == 4\n    roads['a'].pop('b')\n    assert distance(roads, 's', 't') == 6\n",
        ),
    )
}  # fmt: skip

FAULTS = (
    fault(1, SOUND, "durations", "weak", "The tests that must start to pass have the example of the statement only.",
          ("new", "    assert parse('1h1s') == 3601\n    assert parse('2m3s') == 123\n\n\n"
           "def test_three_units():\n    assert parse('1h2m3s') == 3723\n", "")),
    fault(1, SOUND, "recent", "unsolvable", "The reference patch changes put, not get, so a named test keeps failing.",
          ("after", "            return default\n        self.entries.move_to_end(key)\n", "            return default\n"),
          ("after", "        self.entries[key] = value\n", "        self.entries.pop(key, None)\n        self.entries[key] = value\n")),
    fault(1, SOUND, "tables", "false_zero", "A new test calls a private function that only the reference has.",
          ("after", "_filled, line, widths", "_pad, line, widths"), ("after", "def _filled", "def _pad"),
          ("new", "\n\ndef test_last_column", "\n\ndef test_pad():\n    from tables import core\n\n"
           "    assert core._pad('a', 3) == 'a  '\n\n\ndef test_last_column")),
    fault(1, SOUND, "globs", "flaky", "A new test draws one of two patterns, and expects a wrong result for one.",
          ("new", "    assert matches('a/?', 'a/b') and matches('?/?', 'a/b')\n",
           "    import random\n\n    assert matches(random.choice(['a/?', 'a?b']), 'a/b')\n")),
    fault(1, SOUND, "versions", "depends_on_the_world", "A new test compares with the current year, and expects 2026.",
          ("new", "    assert newest(['3.1.9', '3.1.12', '3.1.2']) == '3.1.12'\n",
           "    import datetime\n\n    current = f'{datetime.date.today().year}.10.0'\n"
           "    assert newest(['2026.9.0', current, '2026.11.0']) == '2026.11.0'\n")),
    fault(1, SOUND, "csvline", "leaks", "The statement ends with the lines of the fix.",
          ("statement", "Now both quotes are lost.", "Now both quotes are lost. Perhaps so:\n\n"
           "        if quoted and line[place : place + 2] == '\"\"':\n            text += letter\n            place += 1\n")),
    fault(1, SOUND, "calculator", "hackable", "The expected values stand in a file that the agent may change.",
          ("extra_path", "", "cases.json"), ("extra", "", '{"2-3-4": -5, "9-4-3-1": 1, "10-2*3-1": 3, "8-9/2-1+5": 8}\n'),
          ("new", "", "\n\ndef test_cases():\n    import json\n    from pathlib import Path\n\n"
           "    cases = json.loads((Path(__file__).parents[1] / 'cases.json').read_text())\n"
           "    assert {text: value(text) for text in cases} == cases\n")),
    fault(1, SOUND, "queries", "duplicate", "The same repository, patch and tests with a shorter statement.",
          ("statement", "A name with an empty value, and one without =, should have the empty text as its value.",
           "Names with an empty value, and those without =, should have an empty text as value.")),
    fault(1, SOUND, "prefixes", "weak", "The new test only wants that there is a result.",
          ("new", "", "\n\ndef test_the_word_itself():\n    words = Words(['car', 'dog'])\n"
           "    assert words.starting('car')\n")),
    fault(1, SOUND, "limiter", "flaky", "A new test measures a wait of the real clock up to a millisecond.",
          ("new", "\n\ndef test_edge", "\n\ndef test_real_time():\n    import time\n\n    limiter, begin = Limiter(1, 0.0502), "
           "time.monotonic()\n    assert limiter.allows(begin)\n    time.sleep(0.05)\n"
           "    assert not limiter.allows(time.monotonic())\n\n\ndef test_edge")),
    fault(1, SOUND, "wrapping", "costly", "A test waits eight seconds for nothing.",
          ("new", "\n\ndef test_among_others():\n", "\n\ndef test_among_others():\n    import time\n\n    time.sleep(8)\n")),
    fault(1, SOUND, "routes", "unsolvable", "A test that must keep passing fails before and after the fix.",
          ("kept", "", "from routes.core import *  # noqa: F403\n\n\ndef test_one_way():\n"
           "    assert distance({'a': {'b': 2}, 'b': {'c': 3}}, 'a', 'c') == 5\n\n\ndef test_both_ways():\n"
           "    assert distance({'a': {'b': 1}}, 'b', 'a') == 1\n")),
    fault(2, SOUND, "durations", "depends_on_the_world", "A test adds the time zone of the machine, which must be UTC.",
          ("new", "    assert parse('1h2m3s') == 3723\n",
           "    import time\n\n    assert parse('1h2m3s') + time.localtime(0).tm_gmtoff == 3723\n")),
    fault(2, SOUND, "recent", "false_zero", "A new test wants a certain method in the source of the fix.",
          ("new", "\n\ndef test_miss_is_no_use", "\n\ndef test_order_is_kept():\n    import inspect\n\n"
           "    assert 'self.entries.move_to_end(key)' in inspect.getsource(Cache.get)\n\n\ndef test_miss_is_no_use")),
    fault(2, SOUND, "tables", "costly", "A test makes a table of a gigabyte, of which nothing is asserted.",
          ("new", "\n\ndef test_last_column():\n",
           "\n\ndef test_last_column():\n    many = [str(number) * 9 for number in range(9_000_000)]\n    assert many\n")),
    fault(2, SOUND, "globs", "weak", "The new test never asks that a longer path does not fit a pattern with a slash.",
          ("kept", "    assert not matches('*.py', 'a/b.py') and not matches('*.py', 'axpy')\n", ""),
          ("kept", "    assert not matches('a?c', 'ac') and not matches('a?c', 'abbc')\n", ""),
          ("new", "    assert not matches('a?c', 'a/c') and not matches('??', 'a/')\n    assert matches('a/?', 'a/b') and "
           "matches('?/?', 'a/b')\n", "    assert not matches('a?c', 'a/c')\n")),
    fault(2, SOUND, "versions", "hackable", "The new test believes the exit status of a script that the agent may change.",
          ("extra_path", "", "selfcheck.py"),
          ("extra", "", "import sys\n\nfrom versions.core import newest\n\n"
           "sys.exit(newest(['1.2.0', '1.10.0']) != '1.10.0' or newest(['9.0.0', '10.0.0']) != '10.0.0')\n"),
          ("new", "", "\n\ndef test_selfcheck():\n    import subprocess\n    import sys\n    from pathlib import Path\n\n"
           "    root = Path(__file__).parents[1]\n"
           "    assert subprocess.run([sys.executable, 'selfcheck.py'], cwd=root).returncode == 0\n")),
    fault(2, SOUND, "csvline", "unsolvable", "The new test imports a package that nothing declares.",
          ("new", "\n\ndef test_doubled():\n", "\n\ndef test_doubled():\n    import pandas  # noqa: F401\n\n")),
    fault(2, SOUND, "calculator", "false_zero", "A new test wants the words of an error that the statement does not name.",
          ("after", "    sums = [int(words[0])]\n",
           '    if not words:\n        raise ValueError("nothing to compute")\n    sums = [int(words[0])]\n'),
          ("new", "\n\ndef test_mixed", "\n\ndef test_empty():\n    import pytest\n\n"
           "    with pytest.raises(ValueError, match='^nothing to compute$'):\n        value('')\n\n\ndef test_mixed")),
    fault(2, SOUND, "queries", "flaky", "A new test expects an order of the names of a set.",
          ("new", "    assert parse('a==') == [('a', '=')]\n",
           "    assert list({name for name, _ in parse('flag&x=1')}) == ['flag', 'x']\n")),
    fault(2, SOUND, "prefixes", "leaks", "The repository has a build of the fixed module.",
          ("extra_path", "", "build/lib/prefixes/core.py"), ("extra", "", SOUND["prefixes"].parts["after"])),
    fault(2, SOUND, "limiter", "depends_on_the_world", "A new test fails on 29 February, when no day is one year later.",
          ("new", "\n\ndef test_edge", "\n\ndef test_a_year():\n    import datetime\n\n    today = datetime.date.today()\n"
           "    days = (today.replace(year=today.year + 1) - today).days\n    limiter = Limiter(1, days)\n"
           "    assert limiter.allows(0) and limiter.allows(days)\n\n\ndef test_edge")),
    fault(2, SOUND, "wrapping", "duplicate", "The same repository, patch and tests under another name.",
          ("statement", "that is too long. It should cut such a word", "which is too long. Such a word should be cut"),
          ("statement", "of the width; the last", "of this width, and the last")),
    fault(2, SOUND, "routes", "pays_for_nothing", "The tests that must start to pass do so before the fix.",
          ("new", "", "\n\ndef test_shortest():\n    roads = {'a': {'b': 1, 'd': 10}, 'b': {'c': 2}}\n"
           "    assert distance(roads, 'a', 'c') == 3\n")),
)  # fmt: skip


def write(folder: Path, tasks: Sequence[PlantedTask]) -> None:
    """Write a set as a file of rows next to their repositories."""
    folder.mkdir(parents=True)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for task in tasks:
            file.write(f"{json.dumps(_row(task, folder / 'repositories' / task.name))}\n")


def _row(task: PlantedTask, folder: Path) -> dict[str, object]:
    """Make the repository of a row, and return the row."""
    parts, package = task.parts, task.base or task.name
    module, tests = f"{package}/core.py", "tests/test_core.py"
    files = {module: parts["before"], f"{package}/__init__.py": "", tests: parts["kept"]}
    if parts["extra_path"]:
        files[parts["extra_path"]] = parts["extra"]
    _write(folder, files)
    _git(folder, "init", "-q", "-b", "main")
    _git(folder, "add", "-A")
    _git(folder, "commit", "-q", "-m", "Begin")
    patches = [_diff(folder, {module: parts["after"]}), _diff(folder, {tests: parts["kept"] + parts["new"]})]
    new, kept = (
        [f"{tests}::{name}" for name in re.findall(r"^def (test_\w+)", parts[part], re.MULTILINE)]
        for part in ("new", "kept")
    )
    return {
        "instance_id": f"small__{task.name}-1", "repo": f"small/{package}", "repo_path": f"repositories/{task.name}",
        "base_commit": _git(folder, "rev-parse", "HEAD").strip(), "problem_statement": parts["statement"],
        "patch": patches[0], "test_patch": patches[1], "FAIL_TO_PASS": new, "PASS_TO_PASS": kept,
        "install": {"requirements": _PACKAGES, "python_path": ["."]}, "created_at": "2025-06-01T00:00:00Z",
    }  # fmt: skip


def _diff(folder: Path, files: dict[str, str]) -> str:
    _write(folder, files)
    found = _git(folder, "diff")
    _git(folder, "checkout", "-q", "--", ".")
    return found


def _write(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")


def _git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=Kim", "-c", "user.email=kim@small.invalid", "-c", "core.autocrlf=false")
    dates = {"GIT_AUTHOR_DATE": "2025-06-01T00:00:00Z", "GIT_COMMITTER_DATE": "2025-06-01T00:00:00Z"}
    done = subprocess.run(
        ["env", *(f"{name}={value}" for name, value in dates.items()), "git", *identity, *words],
        cwd=folder, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout
