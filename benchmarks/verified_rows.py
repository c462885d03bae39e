"""Rows of SWE-bench Verified as they are published, played by the oracle and by doing nothing.

    git clone https://github.com/pallets/flask clones/pallets/flask          # and so on
    .venv/bin/python benchmarks/verified_rows.py --rows verified.jsonl --clones clones --per-repo 3
    .venv/bin/python benchmarks/verified_rows.py --rows verified.jsonl --clones clones --quick --env.narrow true

First it reads all rows of the file. Then it plays the newest rows of the repositories in `CLONES/OWNER/NAME`, without
images and without a list of packages. Further options of the form `--env.NAME VALUE` are settings of the environment. A
row is ok if the oracle earns 1.0 and doing nothing 0.0; for the others, it prints the reason that a user sees.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import _measure as measure
from _row_plays import Rewards, play

from palaestra.envs.datasets import read_rows
from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import JSON
from palaestra_suites.swe.swe_row import parse_row

Rows = Sequence[Mapping[str, JSON]]


def read(file: Path) -> tuple[list[Mapping[str, JSON]], list[str]]:
    """Return the rows of a file that can be read, and why the others cannot."""
    rows, refused = list[Mapping[str, JSON]](), list[str]()
    for number, raw in read_rows(file, split="test"):
        try:
            if isinstance(raw, TaskError):
                raise raw
            parse_row(raw, number)
        except TaskError as error:
            refused.append(str(error))
        else:
            rows.append(raw)
    return rows, refused


def chosen(rows: Rows, clones: Path, options: argparse.Namespace) -> Rows:
    """Return the newest rows of each repository that has a clone; with `quick`, one of each."""
    found = [row for row in rows if (clones / str(row["repo"])).exists()]
    if options.only:
        found = [row for row in found if any(word in str(row["instance_id"]) for word in options.only)]
    seen: Counter[JSON] = Counter()
    kept = []
    for row in sorted(found, key=lambda row: str(row["created_at"]), reverse=True):
        seen[row["repo"]] += 1
        if seen[row["repo"]] <= (1 if options.quick else options.per_repo or len(found)):
            kept.append(row)
    return kept


def play_rows(rows: Rows, clones: Path, workers: int, settings: Sequence[str]) -> dict[str, Rewards]:
    """Play both policies over these rows, and return their rewards by the row's id."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        own = ["--env.dataset_name", str(file), "--env.shuffle", "false"]
        own += ["--env.repo_base_url", f"file://{clones}", *settings]
        ids = [str(row["instance_id"]) for row in rows]
        found = asyncio.run(play("verified rows", own, ids, workers))
    return {name: found.get(name, Rewards(None, None, "the environment skipped this row")) for name in ids}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="a file with rows of SWE-bench Verified")
    parser.add_argument("--clones", type=Path, required=True, help="a folder with the clones, as OWNER/NAME")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="only rows whose ids contain a word")
    parser.add_argument("--per-repo", type=int, default=0, metavar="N", help="the newest N rows of each repository")
    parser.add_argument("--workers", type=int, default=2, help="the number of concurrent rows (default 2)")
    parser.add_argument("--quick", action="store_true", help="one row of each repository")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to FILE")
    options, settings = parser.parse_known_args()
    rows, refused = read(options.rows)
    print(f"{measure.machine()}\n{len(rows)} of {len(rows) + len(refused)} rows are read")
    print("".join(f"{text}\n" for text in refused), end="")
    clones = options.clones.resolve()
    table = play_rows(chosen(rows, clones, options), clones, options.workers, settings)
    good = [name for name, got in table.items() if (got.oracle, got.noop) == (1.0, 0.0)]
    for name, got in table.items():
        reason = "" if name in good else next(iter(got.reason.strip().splitlines()), "")
        print(f"{name:<32} oracle {got.oracle}, noop {got.noop}, {got.seconds:.0f} s  {reason}".rstrip())
    print(f"{len(good)} of {len(table)} rows as published ({len(good) / max(1, len(table)):.0%})")
    if options.json:
        played = [{"name": name, **asdict(got)} for name, got in table.items()]
        options.json.write_text(json.dumps({"command": sys.argv, "rows": played}, indent=1))
    return 0 if len(good) == len(table) and not refused else 1


if __name__ == "__main__":
    raise SystemExit(main())
