"""Write tests/slow_tests.txt from recorded durations: the tests that take half a second or longer.

`make durations` runs the tests, records the seconds of each, and calls this script. A test function most of whose
cases are slow is listed once, without parameters. With --files, print the test files that have a slow test instead,
so that `make test-slow` collects only those. With --add, the tests that are listed already stay, as after a run of the
quick tests alone.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path

SLOW_S = 0.5
ROOT = Path(__file__).parent.parent
LISTED = ROOT / "tests" / "slow_tests.txt"
_MARKED = re.compile(r"mark\.slow\b")


def slow_tests(seconds: dict[str, float]) -> list[str]:
    """Return the node ids to list, sorted."""
    cases = defaultdict(list)
    for node_id in seconds:
        cases[node_id.partition("[")[0]].append(node_id)
    found = []
    for function, node_ids in cases.items():
        slow = [each for each in node_ids if seconds[each] >= SLOW_S]
        found += [function] if 2 * len(slow) > len(node_ids) else slow
    return sorted(found)


def slow_files() -> list[str]:
    """Return the files with a listed test or with the marker in their text."""
    listed = {line.partition("::")[0] for line in LISTED.read_text(encoding="utf-8").splitlines()}
    folders = (ROOT / "tests", *ROOT.glob("packages/*/tests"), *ROOT.glob("extensions/*/tests"))
    paths = sorted(path.relative_to(ROOT) for folder in folders for path in folder.rglob("test_*.py"))
    return [str(path) for path in paths if str(path) in listed or _MARKED.search((ROOT / path).read_text("utf-8"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("durations", nargs="?", type=Path, help="the JSON file that `pytest --durations-file` wrote")
    parser.add_argument("--files", action="store_true", help="print the test files that have a slow test")
    parser.add_argument("--add", action="store_true", help="keep the tests that are listed already")
    options = parser.parse_args()
    if options.files:
        print("\n".join(slow_files()))
        return
    if options.durations is None:
        parser.error("name the file of durations, or use --files")
    seconds = json.loads(options.durations.read_text(encoding="utf-8"))
    found = slow_tests(seconds)
    if options.add:
        found = sorted({*found, *LISTED.read_text(encoding="utf-8").splitlines()})
    LISTED.write_text("".join(f"{each}\n" for each in found), encoding="utf-8")
    print(f"{LISTED.relative_to(ROOT)}: {len(found)} of {len(seconds)} tests")


if __name__ == "__main__":
    main()
