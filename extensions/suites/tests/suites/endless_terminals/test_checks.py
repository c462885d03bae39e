"""What each check accepts and what it refuses, looked at in one real slot."""

from __future__ import annotations

import asyncio
import functools
import inspect

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import GraderError, SlotLost
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.slot import ExecutionResult, FileInfo
from palaestra_suites.endless_terminals.checks.all_checks import AnyCheck, faults, first_fault
from palaestra_suites.endless_terminals.checks.data_checks import Csv, Ini, Json, JsonLines, Toml, Yaml
from palaestra_suites.endless_terminals.checks.file_checks import (
    Absent,
    Digests,
    Exists,
    FileContent,
    Files,
    Lines,
    Modes,
    SymbolicLink,
)
from palaestra_suites.endless_terminals.checks.program_checks import Archive, Case, Git, Running, Runs, Serves, SqlQuery

SETUP = r"""
printf 'one  \ntwo\r\n\n' > text; printf 'a\n' > exact; printf ' b\n\na\n' > lines; printf '\377\376' > binary
mkdir -p tree/in; echo x > tree/a.txt; echo y > tree/in/b.txt; ln -s tree link; ln -s /etc/passwd out
chmod 640 text; chmod 750 tree
echo '{"n": 1.0, "b": true, "l": [1, 2]}' > good.json; echo '[1,' > torn.json; echo '{"a":1}' > rows.jsonl
echo '{"a":2}' >> rows.jsonl; python3 -c 'print("[" * 100000)' > deep.json
printf 'a,b\r\n"1, 2",3\r\n' > t.csv; printf 'a\tb\n1\t2\n' > t.tsv; printf '[s]\nKey: v\n' > c.ini
(cat c.ini; printf '#%.0s' $(seq 17000)) > large.ini
printf 'x = [1]\n' > c.toml; printf 'k: [a, 1, yes]\n' > c.yaml; printf 'no [\n' > bad.any
python3 -c 'print("1" * 5000)' > long.json; python3 -c 'print("a: " + "[x, " * 40000)' > huge.yaml
python3 - > bomb.yaml <<'END'
print("a: &a0 [x, x]", *(f"b{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60)), sep="\n")
END
echo "x = 0x$(printf 'f%.0s' $(seq 5000))" > hex.toml; tr = : < hex.toml > hex.yaml; echo 'k: !!bool maybe' > tag.yaml
echo "\"=\"$(printf '.a%.0s' $(seq 40)) = 1" > key.toml
echo "k: !!int ''" > empty.yaml; echo 'k: !!timestamp now' > time.yaml
echo "k: 1$(printf ':1%.0s' $(seq 400)).5" > base.yaml
sha256sum text lines > sums; tar czf t.tgz tree; python3 -m zipfile -c t.zip tree/a.txt; gzip -c exact > t.gz
python3 -c 'import sqlite3; d = sqlite3.connect("d.db"); d.execute("create table t (a, b)"); \
d.execute("insert into t values (1, 2), (3, null)"); d.commit()'
git init -q -b main repo; cd repo; echo 1 > f; git add f; git -c user.name=n -c user.email=e commit -qm first
git worktree add -q -b side ../side; git config core.fsmonitor 'touch /workspace/owned; false'; cd ..
echo 'echo noise >&2; read x; echo "$1$x"; exit "${2:-0}"' > p.sh; echo 'while True: pass' > loop.py
sleep 1000 & echo $! > pid; echo 987654 > no-pid; echo -5 > bad-pid
mkdir site; echo page > site/p.txt
python3 -m http.server 23457 --bind 127.0.0.1 --directory site >/dev/null 2>&1 &
until python3 -c 'import socket; socket.create_connection(("127.0.0.1", 23457))' 2>/dev/null; do sleep 0.05; done
"""

HOLDS: list[AnyCheck] = [
    FileContent("text", "one\ntwo\n"),
    FileContent("exact", "a\n", exact=True),
    Lines("lines", ["b", "a"]),
    Exists("tree", "dir"),
    Absent("nothing"),
    Absent("text/below"),
    Modes(".", {"text": "640", "tree": "750"}),
    SymbolicLink("link", "tree"),
    Files("tree", {"a.txt": "x", "in/b.txt": None}),
    Digests("sums", ["lines", "text"]),
    Json("good.json", {"l": [1, 2], "n": 1, "b": True}),
    JsonLines("rows.jsonl", [{"a": 1}, {"a": 2}]),
    Csv("t.csv", [["a", "b"], ["1, 2", "3"]]),
    Csv("t.tsv", [["a", "b"], ["1", "2"]], "\t"),
    Ini("c.ini", {"s": {"key": "v"}}),
    Toml("c.toml", {"x": [1]}),
    Yaml("c.yaml", {"k": ["a", 1, True]}),
    Archive("t.tgz", "tar", {"tree/a.txt": "x", "tree/in/b.txt": "y"}),
    Archive("t.zip", "zip", {"a.txt": "x"}),
    Archive("t.gz", "gzip", {"": "a"}),
    SqlQuery("d.db", "select a, b from t order by a", [[1, 2], [3, None]]),
    SqlQuery("d.db", "select a from t order by a desc", [[1], [3]], ordered=False),
    Git("repo", ["log", "--format=%s"], "first"),
    Git("repo", ["status", "--porcelain"], ""),
    Git("side", ["symbolic-ref", "HEAD"], "refs/heads/side"),
    Git("side", ["status", "--porcelain"], ""),
    Runs("p.sh", ["bash"], [Case("ab", ["a"], "b\n"), Case("", ["a", "3"], exit_code=3)]),
    Running("pid", "1000"),
    Serves("/p.txt", 23_457, "page\n"),
    Absent("owned"),
]

FAULTS: list[AnyCheck] = [
    FileContent("text", "one\ntwo\nthree\n"),
    FileContent("exact", "a", exact=True),
    FileContent("nothing", ""),
    FileContent("tree", ""),
    FileContent("binary", ""),
    Lines("lines", ["a", "b"]),
    Exists("tree", "file"),
    Absent("text"),
    Modes(".", {"text": "644"}),
    Modes(".", {"nothing": "644"}),
    SymbolicLink("link", "text"),
    SymbolicLink("tree", "tree"),
    Files("tree", {"a.txt": "x"}),
    Files("tree", {"a.txt": "z", "in/b.txt": None}),
    Files("nothing", {"a": None}),
    Digests("sums", ["lines"]),
    Digests("text", ["lines"]),
    Json("good.json", {"l": [1, 2], "n": True, "b": True}),
    Json("torn.json", [1]),
    Json("deep.json", [1]),
    JsonLines("rows.jsonl", [{"a": 2}, {"a": 1}]),
    JsonLines("torn.json", [1]),
    Csv("t.csv", [["a", "b"], ["1", "2", "3"]]),
    Ini("bad.any", {}),
    Ini("large.ini", {"s": {"key": "v"}}),
    Toml("bad.any", {}),
    Yaml("bad.any", {}),
    Yaml("huge.yaml", {}),
    Yaml("bomb.yaml", {"a": []}),
    Yaml("tag.yaml", {"k": True}),
    Yaml("empty.yaml", {"k": 0}),
    Yaml("time.yaml", {"k": "now"}),
    Yaml("hex.yaml", {"x": 1}),
    Yaml("base.yaml", {"k": 1}),
    Toml("hex.toml", {"x": 1}),
    Toml("key.toml", {"=": functools.reduce(lambda value, _: {"a": value}, range(40), 1)}),  # type: ignore[arg-type]
    Json("long.json", 1),
    Archive("t.tgz", "tar", {"tree/a.txt": "x"}),
    Archive("t.zip", "zip", {"a.txt": "z"}),
    Archive("text", "tar", {}),
    Archive("nothing", "gzip", {"": ""}),
    SqlQuery("d.db", "select a from t order by a desc", [[1], [3]]),
    SqlQuery("text", "select count(*) from sqlite_master", [[0]]),
    SqlQuery("nothing", "select 1", [[1]]),
    Git("repo", ["log", "--format=%s"], "second"),
    Git("tree", ["log", "--format=%s"], "first"),
    Git("nothing", ["log"], ""),
    Git("text/below", ["log"], ""),
    Runs("p.sh", ["bash"], [Case("ab", ["a"], "c\n")]),
    Runs("p.sh", ["bash"], [Case("ab", ["a", "1"], "b\n")]),
    Runs("nothing", ["bash"], [Case("")]),
    Running("pid", "other"),
    Running("text", "one"),
    Running("no-pid", "1000"),
    Running("bad-pid", "1000"),
    Running("nothing", "1000"),
    Serves("/p.txt", 23_457, "other"),
    Serves("/nothing", 23_457, ""),
    Serves("/page", 23_456, "text"),
]


@pytest.mark.slots
def test_what_checks_accept_and_refuse(in_pool) -> None:
    async def scenario(pool: SlotPool) -> None:
        slot = await pool.acquire("checks")
        done = await slot.execute(SETUP)
        assert done.success, done.output
        assert dict(zip(map(repr, HOLDS), await faults(HOLDS, slot), strict=True)) == dict.fromkeys(
            map(repr, HOLDS), ""
        )
        missed = [check for check, fault in zip(FAULTS, await faults(FAULTS, slot), strict=True) if not fault]
        assert missed == []
        assert await first_fault([HOLDS[0], FAULTS[0], Json("nothing", 1)], slot) == (await faults(FAULTS[:1], slot))[0]
        await pool.release(slot)

    in_pool(scenario)


FORGED = """
mkdir repo; cd repo; git init -q -b main; echo 'f filter=own diff=own' > .gitattributes; echo 1 > f
printf '#!/bin/sh\ntouch /workspace/owned; cp /bin/true /usr/bin/git 2>/dev/null; cat' > ../own; chmod +x ../own
git add .; export GIT_AUTHOR_NAME=n GIT_AUTHOR_EMAIL=e GIT_COMMITTER_NAME=n GIT_COMMITTER_EMAIL=e
printf 'tree %s\nauthor n <e> 1 +0000\ncommitter n <e> 1 +0000\ngpgsig -----BEGIN PGP SIGNATURE-----\n x\n \
-----END PGP SIGNATURE-----\n\nfirst\n' $(git write-tree) | git hash-object -t commit -w --stdin > .git/refs/heads/main
for key in gpg.program core.fsmonitor filter.own.clean filter.own.process diff.external diff.own.textconv \
    core.sshCommand core.alternateRefsCommand; do git config $key /workspace/own; done
git config log.showSignature true; git config status.showUntrackedFiles no; git config alias.log 'show-ref'
git config include.path ../../more; printf '[core]\n bare = true\n' > ../more
mkdir -p .git/hooks; cp ../own .git/hooks/post-index-change; echo new > untracked; touch -d 2001-01-01 f
"""


@pytest.mark.slots
def test_the_configuration_of_a_repository_runs_nothing_and_hides_nothing(in_pool) -> None:
    checks: list[AnyCheck] = [
        Git("repo", ["log", "--format=%s"], "first"),
        Git("repo", ["status", "--porcelain"], "?? untracked"),
    ]

    async def scenario(pool: SlotPool) -> None:
        slot = await pool.acquire("forged")
        done = await slot.execute(FORGED)
        assert done.success, done.output
        assert await faults(checks, slot) == ["", ""]
        left = await slot.execute("ls owned; grep -c /workspace/own repo/.git/config")
        assert left.output.endswith("\n8\n")
        assert "No such file" in left.output

    in_pool(scenario)


@pytest.mark.slots
def test_the_programs_of_the_agent_run_last(in_pool) -> None:
    """They could replace the programs of other checks."""
    checks: list[AnyCheck] = [Runs("p.sh", ["sh"], [Case("")]), Exists("kept")]

    async def scenario(pool: SlotPool) -> None:
        slot = await pool.acquire("last")
        await slot.execute("touch kept; echo 'rm /workspace/kept' > p.sh")
        assert await faults(checks, slot) == ["", ""]
        assert await faults(checks[1:], slot) != [""]

    in_pool(scenario)


@pytest.mark.slots
def test_what_a_check_expects_never_enters_the_slot(in_pool) -> None:
    secret = "kept-where-it-is"
    checks: list[AnyCheck] = [
        FileContent("text", secret),
        Json("good.json", {secret: secret}),
        Archive("t.tgz", "tar", {secret: secret}),
        SqlQuery("d.db", "select 1", [[secret]]),
        Runs("p.sh", ["bash"], [Case(secret, ["a"], "b")]),
    ]

    async def scenario(pool: SlotPool) -> None:
        slot = await pool.acquire("checks")
        seen: list[str] = []

        class Watched:
            """The slot, with everything noted that goes in."""

            def __getattr__(self, name: str) -> object:
                inner = getattr(slot, name)

                def call(*args: object, **kwargs: object) -> object:
                    seen.append(repr((name, args, kwargs)))
                    return inner(*args, **kwargs)

                return call if inspect.iscoroutinefunction(inner) else inner

        await slot.execute(SETUP)
        assert all(await faults(checks, Watched()))  # type: ignore[arg-type]
        assert len(seen) >= len(checks)
        assert not any(secret in call for call in seen)
        await pool.release(slot)

    in_pool(scenario)


@pytest.mark.slots
def test_a_slot_that_lies_is_a_fault_and_one_that_is_broken_is_none(in_pool) -> None:
    async def scenario(pool: SlotPool) -> None:
        slot = await pool.acquire("broken")

        class WithoutPython:
            slot_id = slot.slot_id

            async def execute(self, command: list[str], **how: object) -> ExecutionResult:
                return await slot.execute(command, **how, env={"PATH": "/nothing"})  # type: ignore[arg-type]

        with raises(GraderError):
            await faults([SqlQuery("d.db", "select 1", [[1]])], WithoutPython())  # type: ignore[arg-type]
        await pool.release(slot)

    in_pool(scenario)

    class Lying:
        slot_id = "lying"

        async def stat(self, path: str) -> FileInfo:
            return FileInfo(path, "symlink", 1, 0o777, 0.0)

        async def execute(self, command: list[str], **how: object) -> ExecutionResult:
            return ExecutionResult(True, verdict=b"true")

    lied = [SymbolicLink("link", "tree"), Files("tree", {}), SqlQuery("d.db", "select 1", [[1]])]
    assert all(asyncio.run(faults(lied, Lying())))  # type: ignore[arg-type]

    class Lost:
        async def read_bytes(self, path: str, *, max_bytes: int) -> bytes:
            raise SlotLost("gone")

    with pytest.raises(SlotLost):
        asyncio.run(faults([FileContent("text", "")], Lost()))  # type: ignore[arg-type]
