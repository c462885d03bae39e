"""An index of one run's journal: a row for each rollout, with the place of its record in the file.

The index grows with the journal, in slices, so a viewer can show a run while the index is still being built, and while
the run goes on writing. It is an SQLite database in memory or, so that a large run opens quickly the second time, in a
file of the user's cache. It is never in the run's folder. Rollouts are read back by their byte offsets, so memory does
not grow with the conversations. Damaged lines are counted and left out.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import re
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import msgspec

from palaestra.rollouts.events import AttemptDiscarded, GroupStarted, RolloutEnded, RunStarted, TurnTaken
from palaestra.rollouts.grading.reward import DIFFERENCE, UNSEEN
from palaestra.rollouts.journal.journal import check_config, check_schema
from palaestra.rollouts.journal.views import GroupView, RolloutView
from palaestra.rollouts.observe.score_versions import code_of, version
from palaestra.rollouts.observe.usage import RunUsage, UsageLine
from palaestra.rollouts.records import CUT_OFF, Trajectory, whole_cost
from palaestra.rollouts.regraded import GRADES_NAME, Grade, read_grades, with_grade
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.durable_files import UNREADABLE, lines_of, open_regular
from palaestra_slots.core.types import JSON, Blame, Outcome
from palaestra_view.check_evidence import breaks, call_exit_code

IMPORTS = "imports"
"""The folder of the journals that are made from files of other programs, below the folder of the indexes."""

COMMAND = "import"
"""The command in the settings of such a journal."""

_FORMAT = "10"
_TAIL_BYTES = 4096
_EXIT = re.compile(rb'\\?"exit_code\\?":\s*-?[1-9]')
_PREVIEW_CHARS = 240
_MOST_UNSEEN = 20

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    group_id TEXT PRIMARY KEY, number INTEGER, task TEXT, asked TEXT, prompt TEXT DEFAULT '', error TEXT DEFAULT '',
    blame TEXT, ended INTEGER DEFAULT 0, place INTEGER, prepare_s REAL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS groups_number ON groups (number);
CREATE TABLE IF NOT EXISTS rollouts (
    id TEXT PRIMARY KEY, group_id TEXT, number INTEGER, task TEXT, position INTEGER, outcome TEXT, reward REAL,
    official REAL, blame TEXT, error TEXT, labels TEXT, certain INTEGER, metrics TEXT, category TEXT, tokens INTEGER,
    prompt_tokens INTEGER, completion_tokens INTEGER, cost REAL, turns INTEGER, calls INTEGER, errors INTEGER,
    exact INTEGER, segments INTEGER, seconds REAL, model_s REAL, tool_s REAL, grade_s REAL, started REAL, answer TEXT,
    parent INTEGER, difference TEXT, unseen TEXT, breaks TEXT, exits INTEGER, place INTEGER, size INTEGER
);
CREATE INDEX IF NOT EXISTS rollouts_group ON rollouts (group_id);
CREATE INDEX IF NOT EXISTS rollouts_number ON rollouts (number, position);
CREATE INDEX IF NOT EXISTS rollouts_place ON rollouts (place);
CREATE TABLE IF NOT EXISTS grades (
    id TEXT PRIMARY KEY, reward REAL, official REAL, labels TEXT, certain INTEGER, metrics TEXT
) WITHOUT ROWID;
CREATE VIEW IF NOT EXISTS graded AS SELECT
    rollouts.id, group_id, number, task, position, outcome, rollouts.reward AS recorded, blame, error, category, tokens,
    prompt_tokens, completion_tokens, cost, turns, calls, errors, exact, segments, seconds, model_s, tool_s, grade_s,
    started, answer, parent, difference, unseen, breaks, exits, place, size,
    CASE WHEN grades.id IS NULL THEN rollouts.reward ELSE grades.reward END AS reward,
    CASE WHEN grades.id IS NULL THEN rollouts.official ELSE grades.official END AS official,
    COALESCE(grades.labels, rollouts.labels) AS labels, COALESCE(grades.certain, rollouts.certain) AS certain,
    COALESCE(grades.metrics, rollouts.metrics) AS metrics
    FROM rollouts LEFT JOIN grades ON grades.id = rollouts.id;
CREATE TABLE IF NOT EXISTS attempts (rollout TEXT, outcome TEXT, error TEXT, place INTEGER, started REAL);
CREATE INDEX IF NOT EXISTS attempts_rollout ON attempts (rollout);
CREATE TABLE IF NOT EXISTS turns (rollout TEXT, turn INTEGER, at REAL, tokens INTEGER, place INTEGER);
CREATE INDEX IF NOT EXISTS turns_rollout ON turns (rollout);
CREATE TABLE IF NOT EXISTS states (rollout TEXT, turn INTEGER, place INTEGER, PRIMARY KEY (rollout, turn));
CREATE TABLE IF NOT EXISTS placed (group_id TEXT PRIMARY KEY, node TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS marks (rollout TEXT, kind TEXT, value TEXT);
CREATE INDEX IF NOT EXISTS marks_rollout ON marks (rollout, kind);
"""

_LISTED = (
    "id", "group_id", "number", "task", "position", "outcome", "reward", "recorded", "official", "blame", "error",
    "labels", "metrics", "category", "prompt_tokens", "completion_tokens", "cost", "turns", "calls", "errors", "exact",
    "segments", "seconds", "model_s", "tool_s", "started", "answer", "parent", "exits",
)  # fmt: skip
_TEXTS = {"task": "task", "id": "id", "outcome": "outcome", "blame": "blame", "label": "labels", "error": "error",
          "category": "category", "answer": "answer", "group": "group_id"}  # fmt: skip
_NUMBERS = {"reward": "reward", "official": "COALESCE(official, reward)", "tokens": "tokens", "turns": "turns",
            "seconds": "seconds", "calls": "calls", "errors": "errors", "exits": "exits", "cost": "cost",
            "index": "position", "started": "started", "segments": "segments",
            "recorded": "recorded",
            "regraded": "(SELECT grades.reward FROM grades WHERE grades.id = graded.id)"}  # fmt: skip
_COMPARISONS = ("=", "!=", "<", "<=", ">", ">=")

RESUMED = "resumed:"
"""The beginning of the facts that count resumed rollouts, by the reason why they started again."""

NODE, ROLLOUTS_ON = "node:", "rollouts on:"
"""The beginnings of the facts about a node of a cluster, which is named after them: what the journal says (JSON), and
the number of rollouts that ended there."""

CODE = "code:"
"""The beginning of the facts with the hash of the environment's file for the lines from a place on."""

_MARKS = ("tag", "verdict", "note")
NUMBERS = tuple(_NUMBERS)
"""The fields that are numbers."""

FIELDS = (*_TEXTS, *_NUMBERS, *_MARKS)
"""The names by which rollouts can be filtered and sorted; `metric.NAME` also works."""

Condition = tuple[str, str, str | float]
"""A field, a comparison (`:` for contains, `=`, `!=`, `<`, `<=`, `>`, `>=`) and a value. The field `any` is the task,
the id, the error, the category or the answer. `=` with an empty value finds rollouts that have no such value."""


class _Detail(msgspec.Struct):
    category: msgspec.Raw = msgspec.Raw(b'""')
    difference: msgspec.Raw = msgspec.field(default=msgspec.Raw(b'""'), name=DIFFERENCE)
    unseen: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"[]"), name=UNSEEN)
    work_breaks_check: msgspec.Raw = msgspec.Raw(b'""')
    work_failed: msgspec.Raw = msgspec.Raw(b'""')


class _Segment(msgspec.Struct):
    tokens: str


class _Ledger(msgspec.Struct):
    segments: list[_Segment]


class _Parent(msgspec.Struct):
    index: int


class _Head(msgspec.Struct):
    """The fields of a message that the index needs."""

    role: msgspec.Raw = msgspec.Raw(b'""')
    content: msgspec.Raw = msgspec.Raw(b'""')


class _Rollout(RolloutView):
    detail: _Detail = msgspec.field(default_factory=_Detail)
    messages: list[msgspec.Raw] = msgspec.field(default_factory=list)
    turns: list[msgspec.Raw] = msgspec.field(default_factory=list)
    tool_calls_attempted: int = 0
    tool_errors: list[msgspec.Raw] = msgspec.field(default_factory=list)
    ledger: _Ledger | None = None
    parent: _Parent | None = None


class _Line(UsageLine):
    trajectory: _Rollout | None = None
    seed: int = 0
    config: dict[str, JSON] = msgspec.field(default_factory=dict)
    state: msgspec.Raw = msgspec.Raw()


_lines = msgspec.json.Decoder(_Line)
_message = msgspec.json.Decoder(_Head)
_ended = msgspec.json.Decoder(RolloutEnded | AttemptDiscarded)
_turn = msgspec.json.Decoder(TurnTaken)
_started = msgspec.json.Decoder(GroupStarted)


class RunIndex:
    """The index of the journal at `path`. All methods may be called from any thread.

    `store` is the folder for the index's file; None keeps the index in memory.
    """

    def __init__(self, path: Path, store: Path | None = None) -> None:
        self.path = path
        self.folder = path.parent
        """The folder of the run, or what the index was made from."""
        self._lock = threading.Lock()
        self._place = -1
        self._closed = False
        self.grades: Mapping[str, Grade] = {}
        """The scores that `palaestra grade` gave."""
        self._grades_stamp: JSON = ""
        self._store = None if store is None else store / f"{_name_of(path)}.sqlite"
        self._db = self._open_index()

    def close(self) -> None:
        """Close the database, once no other thread uses it: SQLite crashes otherwise. Idempotent."""
        with self._lock:
            self._closed = True
            self._db.close()

    def update(self, seconds: float = 0.1) -> bool:
        """Index the lines that the journal has gained, for about `seconds`, and new scores. Returns whether there were
        any. A last line without an end stays for later. Raises `ConfigError` if the file is not a journal of a run."""
        with self._lock:
            if self._closed:
                return False
            regraded = self._take_grades()
            return regraded if self.path.stat().st_size == self._place else self._index(seconds) or regraded

    def _take_grades(self) -> bool:
        """Read the file of new scores if it has changed, and return whether it has."""
        stamp = file_stamp(self.path.parent / GRADES_NAME)
        if stamp == self._grades_stamp:
            return False
        first, self._grades_stamp = self._grades_stamp == "", stamp
        try:
            self.grades = read_grades(self.path.parent)
        except ConfigError:  # the page of the run names the problem
            self.grades = {}
        with self._writing():
            self._db.execute("DELETE FROM grades")
            self._db.executemany(
                "INSERT INTO grades VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (each.rollout_id, each.reward, each.official, json.dumps([label.name for label in each.labels]),
                     any(label.certain for label in each.labels), json.dumps(each.metrics))
                    for each in self.grades.values() if each.reward is not None
                ],
            )  # fmt: skip
        return not first or bool(self.grades)

    def _index(self, seconds: float) -> bool:
        with self._writing() as offset:
            end = time.monotonic() + seconds
            part = _Slice(self._db, offset)
            with open_regular(self.path) as file:
                file.seek(offset)
                for line in lines_of(file):
                    if not line.endswith(b"\n"):
                        break  # being written, or torn by a kill
                    self._take_line(part, line)
                    if time.monotonic() > end:
                        break
                self._keep(part, file, offset)
            self._place = part.place
            return part.place > offset

    @property
    def progress(self) -> tuple[int, int]:
        """How many bytes of the journal are indexed, and how many it has."""
        return int(self.facts().get("offset", "0")), self.path.stat().st_size

    def facts(self) -> dict[str, str]:
        """Return the facts about the whole run by name: `run_id`, `env`, `model`, `seed`, `config` (JSON),
        `started_at`, `last_at`, `ended` (the reason, empty while the run goes on), `offset`, `damaged`."""
        with self._lock:
            return dict(self._db.execute("SELECT name, value FROM facts"))

    def config(self) -> dict[str, JSON]:
        """Return the recorded settings of the run's latest part."""
        found = json.loads(self.facts().get("config", "{}"))
        return found if isinstance(found, dict) else {}

    def rows(
        self,
        where: Sequence[Condition] = (),
        *,
        sort: str = "",
        descending: bool = False,
        offset: int = 0,
        limit: int = 200,
    ) -> tuple[int, list[dict[str, JSON]]]:
        """Return the number of rollouts that fulfil all conditions, and one page of their rows. Without `sort`, they
        come in the order of tasks and indices. Raises `ConfigError` for an unknown field or comparison."""
        clause, values = _where(where)
        order, more = _order(sort, descending)
        with self._lock:
            (total,) = self._db.execute(f"SELECT COUNT(*) FROM graded WHERE {clause}", values).fetchone()  # noqa: S608
            found = self._db.execute(
                f"SELECT {', '.join(_LISTED)} FROM graded WHERE {clause} ORDER BY {order}number, position "  # noqa: S608
                "LIMIT ? OFFSET ?",
                [*values, *more, limit, offset],
            ).fetchall()
        return total, [_listed_row(each) for each in found]

    def groups(self, *, offset: int = 0, limit: int = 200) -> tuple[int, list[dict[str, JSON]]]:
        """Return the number of groups and one page of them, by number. Each has its `cells`: id, index, reward, outcome
        and official verdict of each rollout, with an outcome of None for rollouts in flight."""
        with self._lock:
            (total,) = self._db.execute("SELECT COUNT(*) FROM groups").fetchone()
            found = self._db.execute(
                "SELECT group_id, number, task, prompt, error, blame, ended, prepare_s FROM groups "
                "ORDER BY number LIMIT ? OFFSET ?",
                [limit, offset],
            ).fetchall()
            names = [each[0] for each in found]
            cells: defaultdict[str, list[JSON]] = defaultdict(list)
            marks = ", ".join("?" * len(names))
            for group_id, *cell in self._db.execute(
                "SELECT group_id, id, position, reward, outcome, official, labels <> '[]' FROM graded "  # noqa: S608
                f"WHERE group_id IN ({marks}) ORDER BY position",
                names,
            ):
                cells[group_id].append(cell)
            flying = [each for (each,) in self._db.execute("SELECT DISTINCT rollout FROM turns")]
        for rollout in flying:
            group_id, _, index = rollout.rpartition("/")
            if group_id in names and all(cell[0] != rollout for cell in cells[group_id]):
                cells[group_id].append([rollout, number_of(index), None, None, None, 0])
        keys = ("group_id", "number", "task", "prompt", "error", "blame", "ended", "prepare_s")
        return total, [dict(zip(keys, each, strict=True), cells=cells[each[0]]) for each in found]

    def scores(self) -> list[tuple[str, str, float | None, float | None, str, str, str, str]]:
        """Return the columns of all rollouts that a summary needs: group, task, reward, official verdict, outcome,
        blame, labels (JSON) and metrics (JSON)."""
        with self._lock:
            return self._db.execute(
                "SELECT group_id, task, reward, official, outcome, COALESCE(blame, ''), labels, metrics FROM graded "
                "ORDER BY number, position"
            ).fetchall()

    def totals(self) -> dict[str, float | None]:
        """Return sums over all rollouts, and the number of rollouts in flight. Discarded attempts are in `usage`."""
        names = ("rollouts", "prompt_tokens", "completion_tokens", "cost", "seconds", "model_s", "tool_s", "exact",
                 "turns", "calls", "errors")  # fmt: skip
        sums = ", ".join(f"SUM({name})" for name in names[1:])
        with self._lock:
            found = self._db.execute(f"SELECT COUNT(*), {sums} FROM graded").fetchone()  # noqa: S608
            (flying,) = self._db.execute("SELECT COUNT(DISTINCT rollout) FROM turns").fetchone()
            (discarded,) = self._db.execute("SELECT COUNT(*) FROM attempts").fetchone()
        return {**dict(zip(names, found, strict=True)), "flying": flying, "discarded": discarded}

    def score_versions(self) -> dict[str, int]:
        """Return the number of scored rollouts by version of the score."""
        codes = sorted((int(name[len(CODE) :]), code) for name, code in self.facts().items() if name.startswith(CODE))
        starts = [start for start, _ in codes]
        with self._lock:
            found = self._db.execute("SELECT id, place FROM graded WHERE reward IS NOT NULL").fetchall()
        parts = ((name, bisect.bisect(starts, place)) for name, place in found)
        return dict(Counter(version(codes[at - 1][1] if at else "", self.grades.get(name)) for name, at in parts))

    def asked_again(self) -> int:
        """Return the number of rollouts of which an earlier attempt failed at the model server or its filter."""
        query = "SELECT COUNT(*) FROM rollouts WHERE id IN (SELECT rollout FROM attempts WHERE outcome = ?)"
        with self._lock:
            (found,) = self._db.execute(query, [Outcome.API_ERROR.value]).fetchone()
        return int(found)

    def usage(self) -> RunUsage:
        """Return the usage of the whole run, as `palaestra status` counts it."""
        return _usage_of(self.facts())

    def all_groups(self) -> list[tuple[str, str, str, str, int]]:
        """Return id, task, checksum of the prompt, error and whether it has ended, for every group."""
        with self._lock:
            return self._db.execute("SELECT group_id, task, asked, error, ended FROM groups ORDER BY number").fetchall()

    def neighbours(self, rollout_id: str) -> tuple[str | None, str | None]:
        """Return the ids of the rollouts before and after a rollout, in the order of tasks and indices."""
        with self._lock:
            found = self._db.execute("SELECT number, position FROM graded WHERE id = ?", [rollout_id]).fetchone()
            if found is None:
                return None, None
            each = [
                self._db.execute(
                    f"SELECT id FROM graded WHERE (number, position) {sign} (?, ?) "  # noqa: S608
                    f"ORDER BY number {order}, position {order} LIMIT 1",
                    found,
                ).fetchone()
                for sign, order in (("<", "DESC"), (">", "ASC"))
            ]
        before, after = (one and one[0] for one in each)
        return before, after

    def trajectory(self, rollout_id: str) -> Trajectory | None:
        """Return the whole record of a finished rollout, or None."""
        with self._lock:
            found = self._db.execute("SELECT place FROM graded WHERE id = ?", [rollout_id]).fetchone()
        return None if found is None else with_grade(self._read_event(found[0], _ended).trajectory, self.grades)

    def attempts(self, rollout_id: str) -> list[dict[str, JSON]]:
        """Return outcome and error of each discarded attempt at a rollout."""
        with self._lock:
            found = self._db.execute("SELECT outcome, error FROM attempts WHERE rollout = ?", [rollout_id]).fetchall()
        return [{"outcome": outcome, "error": error} for outcome, error in found]

    def turns_so_far(self, rollout_id: str) -> list[TurnTaken]:
        """Return the turns of a rollout in flight; empty for other rollouts."""
        with self._lock:
            places = self._db.execute("SELECT place FROM turns WHERE rollout = ? ORDER BY place", [rollout_id])
            found = [each for (each,) in places]
        return [self._read_event(place, _turn) for place in found]

    def states(self, rollout_id: str) -> Iterator[tuple[int, JSON]]:
        """Yield the environment's state of a rollout with the number of each turn that changed it; 0 is the state in
        which it began."""
        with self._lock:
            found = self._db.execute(
                "SELECT turn, place FROM states WHERE rollout = ? ORDER BY turn", [rollout_id]
            ).fetchall()
        for turn, place in found:
            yield turn, self._read_event(place, _turn).state

    def group(self, group_id: str) -> GroupStarted | None:
        """Return the event that started a group, which has its tools; None if there is none."""
        with self._lock:
            found = self._db.execute("SELECT place FROM groups WHERE group_id = ?", [group_id]).fetchone()
        return None if found is None else self._read_event(found[0], _started)

    def put_marks(self, marks: Iterable[tuple[str, str, str]]) -> None:
        """Replace what people have said about rollouts: the rollout's id, the kind (`tag`, `verdict` or `note`) and the
        value."""
        with self._lock, self._writing():
            self._db.execute("DELETE FROM marks")
            self._db.executemany("INSERT INTO marks VALUES (?, ?, ?)", marks)

    def search(
        self, text: str, *, after: int = 0, limit: int = 50, seconds: float = 0.5
    ) -> tuple[list[tuple[str, str]], int, int]:
        """Find a text in the conversations of finished rollouts, from record number `after` on, for about `seconds`.
        Case does not matter if the text is ASCII. `Wanted` defines what is searched. Returns the ids with a passage
        around the first occurrence, the number of the next record to search, and the number of all records."""
        from palaestra_view.search_texts import Wanted  # imported here, because a report searches nothing

        end, found = time.monotonic() + seconds, list[tuple[str, str]]()
        wanted, every = Wanted(text), self._graded_rows()
        number = after
        with open_regular(self.path) as file:
            for number in range(after, len(every)):
                if len(found) >= limit or (time.monotonic() > end and number > after):
                    break
                rollout_id, place, size = every[number]
                file.seek(place)
                passage = wanted.passage(file.read(size))
                if passage is not None:
                    found.append((rollout_id, passage))
            else:
                number = len(every)
        return found, number, len(every)

    def _graded_rows(self) -> list[tuple[str, int, int]]:
        with self._lock:
            return self._db.execute("SELECT id, place, size FROM graded ORDER BY place").fetchall()

    def _read_event(self, place: int, decoder: msgspec.json.Decoder[_EventT]) -> _EventT:
        with open_regular(self.path) as file:
            file.seek(place)
            line = file.readline()
        try:
            return _decode_line(decoder, line)
        except UNREADABLE as error:
            raise ConfigError(f"{self.path}: the line at byte {place} cannot be read: {error}") from error

    def _open_index(self) -> sqlite3.Connection:
        """Open the index's file if it belongs to this journal, or start an empty index."""
        if self._store is not None:
            try:
                self._store.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._store.touch(mode=0o600)
                db = _open_database(str(self._store))
                if _fits(db, self.path):
                    return db
                db.execute("DROP VIEW IF EXISTS graded")
                for table in ("facts", "groups", "rollouts", "grades", "attempts", "turns", "states", "marks"):
                    db.execute(f"DROP TABLE IF EXISTS {table}")
                db.executescript(_SCHEMA)
                return db
            except (OSError, sqlite3.Error):
                self._store = None  # a cache is not worth a failure
        db = _open_database(":memory:")
        db.executescript(_SCHEMA)
        return db

    @contextmanager
    def _writing(self) -> Iterator[int]:
        """Hold a transaction, which another viewer of this run waits for, and yield the offset of the next line."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            found = self._db.execute("SELECT value FROM facts WHERE name = 'offset'").fetchone()
            yield int(found[0]) if found else 0
        except BaseException:
            self._db.rollback()
            raise
        self._db.commit()

    def _take_line(self, part: _Slice, line: bytes) -> None:
        try:
            event = _decode_line(_lines, line)
            if event.event in ("run", "resume"):
                check_config(RunStarted(at=event.at, run_id="", env="", model="", seed=0, config=event.config))
        except (*UNREADABLE, ValueError) as error:
            if part.place == 0:
                raise ConfigError(f"{self.path} is not the journal of a run: {error}") from None
            part.damaged += 1
        else:
            if event.event == "run":
                check_schema(event.schema, self.path)
            elif part.place == 0:
                raise ConfigError(f"{self.path} does not start like a journal: it does not name a run")
            try:
                part.take(event, len(line))
            except OverflowError:  # a number of more than 64 bits
                part.damaged += 1
        part.place += len(line)

    def _keep(self, part: _Slice, file: IO[bytes], offset: int) -> None:
        if part.place == offset:
            return
        part.keep_turns()
        part.note(usage=msgspec.json.encode(part.usage).decode())
        file.seek(max(0, part.place - _TAIL_BYTES))
        tail = hashlib.blake2b(file.read(min(part.place, _TAIL_BYTES))).hexdigest()
        (before,) = self._db.execute("SELECT value FROM facts WHERE name = 'damaged'").fetchone() or ("0",)
        part.note(offset=part.place, tail=tail, format=_FORMAT, damaged=part.damaged + int(before))


class _Slice:
    """The lines that one update adds to the index. `place` is the byte offset of the next line."""

    def __init__(self, db: sqlite3.Connection, place: int) -> None:
        self.place = place
        self.damaged = 0
        self._db = db
        self._turns: dict[str, list[tuple[str, int, float, int, int]]] = {}
        self.usage = _usage_of(dict(db.execute("SELECT name, value FROM facts WHERE name = 'usage'")))

    def take(self, line: _Line, size: int) -> None:
        """Add one event, whose line has `size` bytes."""
        if line.trajectory is None or self._is_new(line.trajectory):
            self.usage.take(line)
        match line.event:
            case "messages":
                turn = (line.rollout_id, line.turn, line.at, sum(line.tokens), self.place)
                self._turns.setdefault(line.rollout_id, []).append(turn)
                self._store_state(line)
            case "rollout" if line.trajectory is not None:
                self._rollout(line.trajectory, size)
            case "discarded" if line.trajectory is not None:
                one = line.trajectory
                self._forget_turns(one.rollout_id)
                attempt = (one.rollout_id, one.outcome, one.error[:_PREVIEW_CHARS], self.place, one.beside.started_at)
                self._db.execute("INSERT INTO attempts VALUES (?, ?, ?, ?, ?)", attempt)
            case "taken_up":
                self._db.execute("INSERT INTO facts VALUES (?, '1') ON CONFLICT (name) DO UPDATE SET value = value + 1",
                                 [f"{RESUMED}{line.anew[:_PREVIEW_CHARS]}"])  # fmt: skip
            case "group" if line.group is not None:
                self._group(line.group)
            case "group_end":
                self._db.execute(
                    "UPDATE groups SET ended = 1, error = ?, blame = COALESCE(?, blame) WHERE group_id = ?",
                    [line.error, line.blame, line.group_id],
                )
            case "run":
                facts = {"run_id": line.run_id, "env": line.env, "model": line.model, "seed": line.seed}
                self._part(line)
                self.note(**facts, started_at=line.at, config=json.dumps(line.config), ended="")
            case "resume":
                self._part(line)
                self.note(ended="", **({"config": json.dumps(line.config)} if line.config else {}))
                self._turns.clear()
                self._db.execute("DELETE FROM turns")
            case "end":
                self.note(ended=line.reason)
            case "node":
                self._node(line)
            case "placed":
                self._db.execute("INSERT OR REPLACE INTO placed VALUES (?, ?)", [line.group_id, line.node])
        if line.at:
            self.note(last_at=line.at)

    def _store_state(self, line: _Line) -> None:
        if bytes(line.state) in (b"", b"null"):
            return
        if line.turn == 0:  # the rollout begins anew
            self._db.execute("DELETE FROM states WHERE rollout = ?", [line.rollout_id])
        self._db.execute("INSERT OR REPLACE INTO states VALUES (?, ?, ?)", [line.rollout_id, line.turn, self.place])

    def keep_turns(self) -> None:
        """Write the turns of the rollouts that have not ended."""
        for turns in self._turns.values():
            self._db.executemany("INSERT INTO turns VALUES (?, ?, ?, ?, ?)", turns)
        self._turns.clear()

    def note(self, **facts: JSON) -> None:
        """Set facts about the whole run."""
        rows = [(name, str(value)) for name, value in facts.items()]
        self._db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", rows)

    def _part(self, line: _Line) -> None:
        """Note which version of the environment's file scores the rollouts from this line on."""
        if code := code_of(line.config):
            self.note(**{f"{CODE}{self.place}": code})

    def _node(self, line: _Line) -> None:
        name = f"{NODE}{line.node}"
        known = self._db.execute("SELECT value FROM facts WHERE name = ?", [name]).fetchone()
        before = json.loads(known[0]) if known else {"losses": 0}
        losses = before["losses"] + bool(line.lost)
        said = {"host": line.host, "level": line.level, "slots": line.slots, "lost": line.lost, "losses": losses}
        self.note(**{name: json.dumps(said)})

    def _group(self, group: GroupView) -> None:
        """Begin a group, or begin it again: then the rollouts that were cut off do not count."""
        marks = ", ".join("?" * len(CUT_OFF))
        self._db.execute(
            "INSERT INTO attempts SELECT id, outcome, error, place, started FROM rollouts "
            "WHERE group_id = ? AND outcome = ? AND blame = ?",
            [group.group_id, Outcome.API_ERROR.value, Blame.ENGINE.value],
        )
        self._db.execute(
            f"DELETE FROM rollouts WHERE group_id = ? AND blame IN ({marks})",  # noqa: S608
            [group.group_id, *(blame.value for blame in CUT_OFF)],
        )
        self._db.execute(
            "INSERT INTO groups (group_id, number, task, asked, blame, place, prepare_s) VALUES (?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (group_id) DO UPDATE SET ended = 0, error = '', place = excluded.place",
            [group.group_id, group.number, group.task_id, group.asked, group.blame, self.place, group.prepare_s],
        )

    def _is_new(self, one: _Rollout) -> bool:
        """Return whether this is the first record of an attempt: a journal may have it twice."""
        key = (one.rollout_id, one.beside.started_at)
        kept = self._db.execute("SELECT 1 FROM rollouts WHERE id = ? AND started = ?", key).fetchone()
        return (
            not kept
            and not self._db.execute("SELECT 1 FROM attempts WHERE rollout = ? AND started = ?", key).fetchone()
        )

    def _forget_turns(self, rollout_id: str) -> None:
        self._turns.pop(rollout_id, None)
        self._db.execute("DELETE FROM turns WHERE rollout = ?", [rollout_id])

    def _rollout(self, one: _Rollout, size: int) -> None:
        self._forget_turns(one.rollout_id)
        found = self._db.execute("SELECT number, prompt FROM groups WHERE group_id = ?", [one.group_id]).fetchone()
        number, prompt = found or (0, "")
        if found and not prompt:
            self._db.execute(
                "UPDATE groups SET prompt = ? WHERE group_id = ?", [_first_text(one.messages, b'"user"'), one.group_id]
            )
        segments = [] if one.ledger is None else one.ledger.segments
        beside, timed = one.beside, one.beside.turn_s  # a time that is not recorded is not 0
        values = (
            one.rollout_id, one.group_id, number, one.task_id, one.index, one.outcome, one.reward, one.official,
            one.blame, one.error[:_PREVIEW_CHARS], json.dumps([label.name for label in one.labels]),
            any(label.certain for label in one.labels), json.dumps(one.metrics), _preview(one.detail.category),
            one.prompt_tokens + one.completion_tokens, one.prompt_tokens, one.completion_tokens,
            whole_cost(one.cost, one.metrics),
            len(one.turns), one.tool_calls_attempted, len(one.tool_errors),
            sum(len(segment.tokens) * 3 // 16 for segment in segments), len(segments), beside.duration_s or None,
            sum(model for model, _ in timed) if timed else None, sum(tool for _, tool in timed) if timed else None,
            beside.stages.get("grade", 0.0), beside.started_at, _first_text(reversed(one.messages), b'"assistant"'),
            None if one.parent is None else one.parent.index, _string(one.detail.difference),
            json.dumps(_strings(one.detail.unseen)), _breaks(one.detail), _exits(one.messages), self.place, size,
        )  # fmt: skip
        marks = ", ".join("?" * len(values))
        self._db.execute(f"INSERT OR REPLACE INTO rollouts VALUES ({marks})", values)  # noqa: S608
        self._db.execute(
            f"INSERT INTO facts SELECT '{ROLLOUTS_ON}' || node, '1' FROM placed WHERE group_id = ? "  # noqa: S608
            "ON CONFLICT (name) DO UPDATE SET value = value + 1",
            [one.group_id],
        )


def _usage_of(facts: Mapping[str, str]) -> RunUsage:
    return msgspec.json.decode(facts["usage"], type=RunUsage) if "usage" in facts else RunUsage()


_EventT = TypeVar("_EventT")
_Values = list[str | float]


def _open_database(name: str) -> sqlite3.Connection:
    db = sqlite3.connect(name, timeout=10.0, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA synchronous = OFF")  # a damaged cache is built again
    db.execute("PRAGMA journal_mode = MEMORY")
    return db


def _decode_line(decoder: msgspec.json.Decoder[_EventT], line: bytes) -> _EventT:
    """Decode a line. Bytes that are not UTF-8 become U+FFFD, so that they do not hide the rest."""
    try:
        return decoder.decode(line)
    except UnicodeDecodeError:
        return decoder.decode(line.decode("utf-8", "replace"))


def number_of(index: str) -> int:
    """Return the number at the end of a rollout's id; 0 if there is none that a run would write."""
    return int(index) if index.isdecimal() and len(index) < 16 else 0


def _name_of(path: Path) -> str:
    return hashlib.blake2b(os.fsencode(path.resolve()), digest_size=12).hexdigest()


def _fits(db: sqlite3.Connection, path: Path) -> bool:
    """Return whether the database is an index of the beginning of this file."""
    try:
        facts = dict(db.execute("SELECT name, value FROM facts"))
    except sqlite3.OperationalError:
        return False
    offset = int(facts.get("offset", "0"))
    if facts.get("format") != _FORMAT or not 0 < offset <= path.stat().st_size:
        return False
    with open_regular(path) as file:
        file.seek(max(0, offset - _TAIL_BYTES))
        return hashlib.blake2b(file.read(min(offset, _TAIL_BYTES))).hexdigest() == facts.get("tail")


class RolloutEvidence(NamedTuple):
    """What an overview of a run needs of one rollout."""

    id: str
    group: str
    task: str
    category: str
    reward: float | None
    official: float | None
    blame: str
    error: str
    difference: str
    unseen: str
    """The changed paths that the check did not see, as a JSON list."""
    breaks: str
    """The error with which the check failed over the work; empty if it did not."""


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written or replaced; None if there is no file."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def evidence(index: RunIndex) -> Iterator[RolloutEvidence]:
    """Yield the evidence of all finished rollouts, in the order in which they ended."""
    last = -1
    while True:
        with index._lock:
            rows = index._db.execute(
                "SELECT place, id, group_id, task, category, reward, official, COALESCE(blame, ''), error, difference, "
                "unseen, breaks FROM graded WHERE place > ? ORDER BY place LIMIT 1000",
                [last],
            ).fetchall()
        if not rows:
            return
        yield from (RolloutEvidence(*row[1:]) for row in rows)
        last = rows[-1][0]


def _first_text(messages: Iterable[msgspec.Raw], role: bytes) -> str:
    """Return the beginning of the first message with this role (as JSON) and with text."""
    for raw in messages:
        try:
            message = _message.decode(raw)
        except UNREADABLE:
            continue
        if bytes(message.role) == role and (text := _preview(message.content)).strip():
            return text
    return ""


def _preview(raw: msgspec.Raw) -> str:
    """Return the beginning of a text in JSON, in one line. The content of a message may be a list of parts."""
    value = json.loads(bytes(raw).decode("utf-8", "replace") or '""')
    if isinstance(value, list):
        value = " ".join(str(part.get("text", "")) for part in value if isinstance(part, Mapping))
    return " ".join(value[: 4 * _PREVIEW_CHARS].split())[:_PREVIEW_CHARS] if isinstance(value, str) else ""


def _string(raw: msgspec.Raw) -> str:
    value = json.loads(bytes(raw).decode("utf-8", "replace") or '""')
    return value if isinstance(value, str) else ""


def _breaks(detail: _Detail) -> str:
    found = {"work_breaks_check": _string(detail.work_breaks_check), "work_failed": _string(detail.work_failed)}
    return breaks({name: text for name, text in found.items() if text})


def _exits(messages: Iterable[msgspec.Raw]) -> int:
    """Return how many results have a nonzero exit code."""
    count = 0
    for raw in messages:
        if _EXIT.search(raw):
            try:
                message = _message.decode(raw)
                content = json.loads(bytes(message.content).decode("utf-8", "replace"))
            except (*UNREADABLE, RecursionError):
                continue
            count += bytes(message.role) == b'"tool"' and call_exit_code(content) != 0
    return count


def _strings(raw: msgspec.Raw) -> list[str]:
    value = json.loads(bytes(raw).decode("utf-8", "replace") or "[]")
    return [str(each)[:_PREVIEW_CHARS] for each in value[:_MOST_UNSEEN]] if isinstance(value, list) else []


def _listed_row(values: Sequence[JSON]) -> dict[str, JSON]:
    row = dict(zip(_LISTED, values, strict=True))
    return row | {"labels": json.loads(row["labels"]), "metrics": json.loads(row["metrics"])}


def _where(conditions: Sequence[Condition]) -> tuple[str, _Values]:
    clauses, values = ["1"], _Values()
    for field, comparison, value in conditions:
        clause, more = _clause(field, comparison, value)
        clauses.append(clause)
        values += more
    return " AND ".join(clauses), values


def _clause(field: str, comparison: str, value: str | float) -> tuple[str, _Values]:
    if field == "any" and comparison == ":":
        columns = ("task", "id", "error", "category", "answer")
        return f"({' OR '.join(f'instr(lower({column}), ?)' for column in columns)})", [str(value).lower()] * 5
    if field == "differs":
        return "(official IS NOT NULL AND official IS NOT reward)", []
    if field == "changed":
        found = _NUMBERS["regraded"]
        return f"({found} IS NOT NULL AND {found} IS NOT recorded)", []
    if field in _MARKS:
        return _mark(field, comparison, str(value))
    if comparison not in (":", *_COMPARISONS):
        raise ConfigError(f"{comparison!r} is not a comparison; use one of : {' '.join(_COMPARISONS)}")
    if field in _TEXTS:
        column = f"COALESCE({_TEXTS[field]}, '')"
        if field == "label" and comparison in ("=", "!="):
            inside = "EXISTS (SELECT 1 FROM json_each(labels) WHERE json_each.value = ?)" if value else "labels = '[]'"
            return (inside if comparison == "=" else f"NOT {inside}"), [value] if value else []
        if comparison in (":", "=", "!="):
            return (
                (f"instr(lower({column}), ?)", [str(value).lower()])
                if comparison == ":"
                else (f"{column} {comparison} ?", [str(value)])
            )
    column, before = _number_column(field)
    if value == "":
        return f"{column} IS {'NOT ' if comparison == '!=' else ''}NULL", before
    try:
        return f"{column} {'=' if comparison == ':' else comparison} ?", [*before, float(value)]
    except ValueError:
        raise ConfigError(f"the filter {field}{comparison}{value} needs a number") from None


def _mark(kind: str, comparison: str, value: str) -> tuple[str, _Values]:
    known = "EXISTS (SELECT 1 FROM marks WHERE rollout = graded.id AND kind = ?{})"
    if comparison not in (":", "=", "!="):
        raise ConfigError(f"{kind} is text, so it cannot be compared with {comparison}")
    if value == "":  # none at all
        return f"{'' if comparison == '!=' else 'NOT '}{known.format('')}", [kind]
    which = " AND instr(lower(value), ?)" if comparison == ":" else " AND value = ?"
    wanted = value.lower() if comparison == ":" else value
    return f"{'NOT ' if comparison == '!=' else ''}{known.format(which)}", [kind, wanted]


def _number_column(field: str) -> tuple[str, _Values]:
    if field.startswith("metric."):
        return "(SELECT value FROM json_each(metrics) WHERE key = ?)", [field.removeprefix("metric.")]
    if field not in _NUMBERS:
        raise ConfigError(f"there is no field {field!r}; the fields are {', '.join(FIELDS)} and metric.NAME")
    return _NUMBERS[field], []


def _order(sort: str, descending: bool) -> tuple[str, _Values]:
    if not sort:
        return "", []
    column, values = (_TEXTS[sort], _Values()) if sort in _TEXTS else _number_column(sort)
    return f"{column} {'DESC' if descending else 'ASC'} NULLS LAST, ", values
