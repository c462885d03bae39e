"""Print the tests that failed in the last run of pytest, a line each.

`pytest --last-failed` runs every test when it no longer finds the one that failed, which takes an hour. Named by its
id, such a test is an error at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

FAILED = Path(".pytest_cache/v/cache/lastfailed")

tests = json.loads(FAILED.read_text()) if FAILED.is_file() else {}
if not tests:
    sys.exit("no test is written down as failed: the run ended in another way, so read its output")
print("\n".join(tests))
