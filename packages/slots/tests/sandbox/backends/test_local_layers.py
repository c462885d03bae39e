"""Seal, fork, view and changes: what grading rests on, against a model of what a view should show."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from palaestra_slots.core.errors import IsolationUnavailable, SandboxError, SlotLost, StaleLease
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.local.local_slot import LocalSlot
from palaestra_slots.sandbox.slot import Rung, Slot, SlotSpec, Snapshot, View
from sandbox.bodies import WithSlot

pytestmark = pytest.mark.slots

T = TypeVar("T")
Tree = dict[str, list[str]]
"""What a directory holds: relative path to kind and content (or target)."""

DUMP = """
import json, os
found = {}
for folder, folders, files in os.walk('.'):
    for name in folders + files:
        path = os.path.join(folder, name)[2:]
        if os.path.islink(path): found[path] = ['symlink', os.readlink(path)]
        elif os.path.isdir(path): found[path] = ['dir', '']
        else: found[path] = ['file', open(path).read()]
print(json.dumps(found))
"""

BASE = """
mkdir -p tests/sub src/tests empty; echo pristine > tests/t; echo deep > tests/sub/u; echo code > src/m
echo x > src/tests/v
ln -s src/tests linked; echo top > conf
"""

DO = """
import json, os, shutil, sys
for operation, *paths in json.loads(sys.argv[1]):
    try:
        first = paths[0]
        if operation == 'write': open(first, 'w').write('agent ' + first)
        elif operation == 'mkdir': os.makedirs(first)
        elif operation == 'remove' and os.path.isdir(first) and not os.path.islink(first): shutil.rmtree(first)
        elif operation == 'remove': os.remove(first)
        elif operation == 'replace':
            shutil.rmtree(first, ignore_errors=True)
            os.makedirs(os.path.join(*paths))
        elif operation == 'rename': os.rename(*paths)
        elif operation == 'link': os.link(*paths)
        elif operation == 'symlink': os.symlink(*paths)
        elif operation == 'mode': os.chmod(first, 0o700)
        elif operation == 'touch': os.utime(first)
        elif operation == 'move': shutil.move(*paths)
    except OSError: pass
"""


class Ground:
    """A backend that lives through several examples, on a loop of its own, and a prepared snapshot."""

    def __init__(self, rung: Rung) -> None:
        self.runner = asyncio.Runner()
        self.backend = LocalBackend(rung=rung)
        try:
            self.run(self.backend.start())
        except IsolationUnavailable as error:
            self.close()
            pytest.skip(str(error))
        self.base = self.run(self._prepare())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    def close(self) -> None:
        self.run(self.backend.aclose())
        self.runner.close()

    async def _prepare(self) -> Snapshot:
        slot = await self.backend.create(SlotSpec(), "prepare")
        assert (await slot.execute(BASE)).success
        return await self.backend.seal(slot)

    async def fork(self, snapshot: Snapshot) -> Slot:
        return await self.backend.create(SlotSpec(), "fork", snapshot)

    async def tree(self, slot: Slot) -> Tree:
        tree: Tree = json.loads((await slot.execute(["python3", "-c", DUMP])).output)
        return tree

    async def shown(self, snapshot: Snapshot) -> Tree:
        slot = await self.fork(snapshot)
        try:
            return await self.tree(slot)
        finally:
            await self.backend.destroy(slot)


@pytest.fixture(scope="module", params=[Rung.FULL, Rung.USERNS], ids=lambda rung: str(rung.label))
def ground(request: pytest.FixtureRequest) -> Iterator[Ground]:
    made = Ground(request.param)
    yield made
    made.close()


def under(tree: Tree, path: str) -> Tree:
    return {name: entry for name, entry in tree.items() if name == path or name.startswith(f"{path}/")}


def ancestors(path: str) -> list[str]:
    names = path.split("/")
    return ["/".join(names[:count]) for count in range(1, len(names))]


def model_only(base: Tree, agent: Tree, path: str) -> Tree:
    """The base with one subtree of the agent's."""
    shown = {name: entry for name, entry in base.items() if name not in under(base, path)}
    if path in agent:
        for parent in ancestors(path):
            if shown.get(parent, ["", ""])[0] != "dir":
                shown = {name: entry for name, entry in shown.items() if name not in under(shown, parent)}
                shown[parent] = ["dir", ""]
        shown |= under(agent, path)
    return shown


def model_without(base: Tree, agent: Tree, path: str) -> Tree:
    """The agent's with one subtree of the base."""
    shown = {name: entry for name, entry in agent.items() if name not in under(agent, path)}
    for parent in ancestors(path):
        if parent in shown and shown[parent][0] != "dir":
            del shown[parent]
            return shown | under(base, parent)
    if path in base:
        shown |= {parent: base[parent] for parent in ancestors(path) if parent not in shown} | under(base, path)
    return shown


names = st.sampled_from(["tests", "src", "empty", "conf", "linked", "new", "sub", "t", "m"])
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
targets = st.sampled_from(["/tmp", "src", "..", "tests", "/workspace/new", "nowhere"])
folders = st.sampled_from(["tests", "src", "src/tests", "empty", "tests/sub"])
operations = st.one_of(
    st.tuples(st.just("replace"), folders, st.sampled_from(["", "tests", "sub", "sub/t"])),
    st.tuples(st.sampled_from(["write", "mkdir", "remove", "mode", "touch"]), paths),
    st.tuples(st.sampled_from(["rename", "link", "move"]), paths, paths),
    st.tuples(st.just("symlink"), targets, paths),
)
chosen = st.sampled_from(["tests", "tests/sub", "tests/t", "src/tests", "src/tests/v", "new/sub", "src", "empty/x"])


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(operations, max_size=12), st.none() | chosen, st.lists(chosen, max_size=2))
def test_a_view_shows_what_the_model_says(
    ground: Ground, done: list[tuple[str, ...]], only: str | None, without: list[str]
) -> None:
    async def body() -> None:
        base = await ground.shown(ground.base)
        slot = await ground.fork(ground.base)
        await slot.execute(["python3", "-c", DO, json.dumps(done)])
        agent = await ground.tree(slot)
        view = View(
            only=("/",) if only is None else (f"/workspace/{only}",),
            without=tuple(f"/workspace/{path}" for path in without),
        )
        expected = agent if only is None else model_only(base, agent, only)
        for path in without:
            expected = model_without(base, expected, path)
        changes = {change.path: change for change in await slot.changes()}
        whole = await ground.backend.seal(slot)
        assert {change.path: change for change in await ground.backend.changes(whole)} == changes
        later = await ground.backend.view(whole, view)
        assert await ground.shown(later) == expected
        assert await ground.shown(whole) == agent
        again = await ground.fork(ground.base)
        await again.execute(["python3", "-c", DO, json.dumps(done)])
        at_once = await ground.backend.seal(again, view)
        assert await ground.shown(at_once) == expected
        check_changes(base, agent, {path.removeprefix("/workspace/"): change.kind for path, change in changes.items()})
        for snapshot in (later, whole, at_once):
            await ground.backend.forget(snapshot)

    ground.run(body())


def check_changes(base: Tree, agent: Tree, changes: dict[str, str]) -> None:
    """Every difference is reported, and nothing is reported deleted that is there."""
    for path in base.keys() | agent.keys():
        if base.get(path) != agent.get(path):
            around = [path, *ancestors(path)]
            assert any(name in changes for name in around), path
            if path in agent:
                assert changes[path] == agent[path][0]
    assert all(path not in agent for path, kind in changes.items() if kind == "deleted")


def cut(ground: Ground, script: str, view: View) -> str:
    """What `find` shows of the workspace after a script of the agent's and a view of it."""

    async def body() -> str:
        slot = await ground.fork(ground.base)
        assert (await slot.execute(script)).success
        sealed = await ground.backend.seal(slot, view)
        graded = await ground.fork(sealed)
        output = (await graded.execute("find . -mindepth 1 | sort; cat tests/t conftest.py 2>&1")).output
        await ground.backend.destroy(graded)
        await ground.backend.forget(sealed)
        return output

    return ground.run(body())


PRISTINE = "./conf\n./empty\n./linked\n./src\n./src/m\n./src/tests\n./src/tests/v\n"
TESTS = "./tests\n./tests/sub\n./tests/sub/u\n./tests/t\n"
NO_PLANT = "pristine\ncat: conftest.py: No such file or directory\n"


@pytest.mark.parametrize(
    "script",
    [
        "echo fake > tests/t; echo plant > conftest.py",
        "rm -rf tests; mkdir tests; echo fake > tests/t",
        "rm -rf tests; mkdir /tmp/t; echo fake > /tmp/t/t; ln -s /tmp/t tests",
        "rm -rf tests; echo fake > tests",
        "mv tests moved; rm -rf moved; mkdir -p tests/sub",
        "echo fake > f; ln -f f tests/t; rm f",
        "rm -rf tests",
        "chmod 000 tests; echo plant > conftest.py",
    ],
)
def test_tests_come_back_and_plants_go(ground: Ground, script: str) -> None:
    view = View(without=("/workspace/tests", "/workspace/conftest.py"))
    assert cut(ground, script, view) == PRISTINE + TESTS + NO_PLANT


REPLACED = "rm -rf src; mkdir -p src/tests; echo new > src/new"


@pytest.mark.parametrize(
    ("view", "shown"),
    [
        (View(without=("/workspace/src/tests",)), {"src", "src/new", "src/tests", "src/tests/v"}),
        (View(without=("/workspace/src/m",)), {"src", "src/new", "src/tests", "src/m"}),
        (View(only=("/workspace/src/tests",)), {"src", "src/m", "src/tests"}),
        (View(only=("/workspace/src",)), {"src", "src/new", "src/tests"}),
        (View(only=("/workspace/src/m",)), {"src", "src/tests", "src/tests/v"}),
        (View(only=("/workspace/src/new", "/workspace/conf")), {"src", "src/m", "src/new", "src/tests", "src/tests/v"}),
        (View(only=("/workspace",), without=("/",)), {"src", "src/m", "src/tests", "src/tests/v"}),
        (View(only=()), {"src", "src/m", "src/tests", "src/tests/v"}),
    ],
)
def test_a_directory_that_was_replaced_is_cut_where_the_view_says(ground: Ground, view: View, shown: set[str]) -> None:
    async def body() -> None:
        slot = await ground.fork(ground.base)
        assert (await slot.execute(REPLACED)).success
        sealed = await ground.backend.seal(slot, view)
        assert set(under(await ground.shown(sealed), "src")) == shown

    ground.run(body())


def test_a_workspace_that_became_a_link_does_not_lead_elsewhere(ground: Ground) -> None:
    script = (
        "cd /; mkdir -p /opt/evil/tests; echo fake > /opt/evil/tests/t; rm -rf /workspace; ln -s /opt/evil /workspace"
    )
    view = View(without=("/workspace/tests",))
    assert cut(ground, script, view) == PRISTINE + TESTS + NO_PLANT


def test_links_of_the_snapshot_on_the_way_are_part_of_the_path(ground: Ground) -> None:
    script = "rm linked; mkdir linked; echo fake > linked/v; echo fake > src/tests/v"

    async def body() -> None:
        slot = await ground.fork(ground.base)
        await slot.execute(script)
        graded = await ground.fork(await ground.backend.seal(slot, View(without=("/workspace/linked/v",))))
        assert (await graded.execute("readlink linked; cat linked/v src/tests/v")).output == "src/tests\nx\nx\n"

    ground.run(body())


def test_only_the_workspace_leaves_the_system_as_it_was(ground: Ground) -> None:
    async def body() -> None:
        slot = await ground.fork(ground.base)
        await slot.execute(
            "echo mine > src/m; echo evil > /etc/passwd; echo evil > /usr/local/bin/python3; echo e > /root/.bashrc"
        )
        sealed = await ground.backend.seal(slot, View(only=("/workspace",), without=("/workspace/tests",)))
        assert [change.path for change in await ground.backend.changes(sealed)] == ["/workspace/src/m"]
        graded = await ground.fork(sealed)
        shown = await graded.execute("cat src/m; head -1 /etc/passwd; ls /usr/local/bin/python3 /root/.bashrc")
        assert shown.output.startswith("mine\nroot:x:0:0")
        assert shown.output.count("No such file") == 2

    ground.run(body())


def test_changes_name_what_was_replaced(ground: Ground) -> None:
    async def body() -> None:
        slot = await ground.fork(ground.base)
        await slot.execute(
            "rm -rf tests; mkdir tests; echo n > tests/n; rm conf; rm -r src/tests; echo f > src/tests; rm linked;"
            "mkdir linked; mkfifo pipe; touch $'od\\nd \\xff'; mv empty empty2; echo keep > kept; rm kept"
        )
        found = {
            (change.path.removeprefix("/workspace/"), change.kind, change.opaque) for change in await slot.changes()
        }
        assert found == {
            ("tests/sub", "deleted", False), ("tests/t", "deleted", False), ("tests/n", "file", False),
            ("conf", "deleted", False),
            ("src/tests", "file", False), ("linked", "dir", True), ("pipe", "other", False),
            ("od\nd \udcff", "file", False), ("empty", "deleted", False), ("empty2", "dir", False),
        }  # fmt: skip

    ground.run(body())


@pytest.mark.parametrize(
    ("command", "changes"),
    [
        ("touch -d '2001-01-01' conf tests/t", []),
        ("echo x >> conf; echo top > conf", []),
        ("chmod 600 conf; chmod a+w tests/t; chown 7:7 src/m; chmod u-w tests/sub/u", []),
        ("cp -p conf /tmp/c; cp /tmp/c conf; mv conf conf~; cp conf~ conf; rm conf~", []),
        ("mv tests old; mv old tests", []),
        ("cp -r tests copy; rm -r tests; mkdir -p tests/sub; mv copy/t tests; mv copy/sub/u tests/sub; rm -r copy", []),
        ("rm linked; ln -s src/tests linked", []),
        ("rm linked; ln -s src linked", [("linked", "symlink", True)]),
        ("echo tip > conf", [("conf", "file", True)]),
        ("rm conf; ln -s tests/t conf", [("conf", "symlink", True)]),
        ("chmod u+x conf; chmod u+s src/m", [("conf", "file", False), ("src/m", "file", False)]),
        ("ln conf other", [("conf", "file", False), ("other", "file", True)]),
        ("mv tests old; mkdir -p tests/sub; mv old/t tests; echo deep > tests/sub/u; rm -r old", []),
        ("mv tests old; mkdir tests; mv old/t tests; rm -r old", [("tests/sub", "deleted", True)]),
        ("mv src old; mkdir -p src/tests; rm -r old", [("src/m", "deleted", True), ("src/tests/v", "deleted", True)]),
    ],
)
def test_a_file_with_its_content_is_no_change(
    ground: Ground, command: str, changes: list[tuple[str, str, bool]]
) -> None:
    async def body() -> None:
        slot = await ground.fork(ground.base)
        done = await slot.execute(f"umask 022; {command}")
        assert done.success, done.output
        running = await slot.changes()
        sealed = await ground.backend.seal(slot)
        for found in (running, await ground.backend.changes(sealed)):
            assert [
                (change.path.removeprefix("/workspace/"), change.kind, change.content)
                for change in found
                if change.path.startswith("/workspace/") and change.kind != "dir"
            ] == changes

    ground.run(body())


def test_what_is_missing_from_a_directory_that_was_made_again_can_be_left_out(ground: Ground) -> None:
    async def body() -> None:
        slot = await ground.fork(ground.base)
        await slot.execute("mv src old; mkdir -p src/tests; echo new > src/n; rm -r old")
        missing = [change.path for change in await slot.changes() if change.kind == "deleted"]
        assert missing == ["/workspace/src/m", "/workspace/src/tests/v"]
        graded = await ground.fork(await ground.backend.seal(slot, View(("/",), tuple(missing))))
        assert (await graded.execute("cat src/m src/n src/tests/v")).output.split() == ["code", "new", "x"]

    ground.run(body())


def test_forks_do_not_see_each_other_and_cost_nothing_that_grows(ground: Ground) -> None:
    async def body() -> None:
        slot = await ground.fork(ground.base)
        await slot.execute("mkdir many; cd many; for i in $(seq 3000); do echo $i > f$i; done")
        snapshot = await ground.backend.seal(slot)
        with pytest.raises(StaleLease):
            await slot.execute("true")
        forks = await asyncio.gather(*(ground.fork(snapshot) for _ in range(4)))
        for number, fork in enumerate(forks):
            await fork.execute(f"rm many/f{number + 1}; echo mine > many/f100")
        for number, fork in enumerate(forks):
            assert (await fork.execute(f"ls many | wc -l; cat many/f{number + 1} many/f100")).output.startswith(
                "2999\n"
            )
            assert len(await fork.changes()) == 2
            await ground.backend.destroy(fork)

    ground.run(body())


def test_a_chain_of_snapshots(ground: Ground) -> None:
    async def body() -> None:
        snapshot = ground.base
        for number in range(12):
            slot = await ground.fork(snapshot)
            await slot.execute(f"echo {number} >> log; rm -rf d; mkdir d; touch d/{number}")
            snapshot = await ground.backend.seal(slot)
        assert len(snapshot.layers) == 13
        slot = await ground.fork(snapshot)
        assert (await slot.execute("cat log | wc -l; ls d")).output == "12\n11\n"

    ground.run(body())


def test_what_is_forgotten_stays_for_those_who_stand_on_it(ground: Ground) -> None:
    async def body() -> None:
        slot = await ground.fork(ground.base)
        await slot.execute("echo mine > f")
        snapshot = await ground.backend.seal(slot)
        fork = await ground.fork(snapshot)
        await ground.backend.forget(snapshot)
        await ground.backend.forget(snapshot)
        assert (await fork.execute("cat f; rm f tests/t")).output == "mine\n"
        assert [change.path for change in await fork.changes()] == ["/workspace/f", "/workspace/tests/t"]
        with pytest.raises(SandboxError, match="layer-"):
            await ground.fork(snapshot)

    ground.run(body())


def test_sealing_ends_processes_before_the_layer_is_used(ground: Ground) -> None:
    async def body() -> None:
        slot = await ground.fork(ground.base)
        await slot.execute("for i in 1 2 3; do setsid sh -c 'while :; do echo tamper > tests/t; done' & done")
        fork = await ground.fork(await ground.backend.seal(slot, View(without=("/workspace/tests",))))
        for _ in range(20):
            assert await fork.read_text("tests/t") == "pristine\n"

    ground.run(body())


def test_a_layer_does_not_change_by_what_was_under_way(ground: Ground) -> None:
    """An upload and a removal that have begun when their slot is sealed end with it."""

    async def body() -> None:
        slot = await ground.fork(ground.base)
        assert isinstance(slot, LocalSlot)
        assert (await slot.execute("mkdir many; cd many; seq 40000 | xargs touch")).success
        more = threading.Event()

        class Slow(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                if self.tell():
                    more.wait()
                return super().read(size)

        upload = asyncio.ensure_future(
            slot.requests.upload_file({**slot.lease(), "path": "/workspace/late"}, Slow(bytes(12 << 20)))
        )
        while "late" not in (await slot.execute("ls -A; ls -A | grep -q '^[.]' && echo late")).output:
            pass
        removal = asyncio.ensure_future(slot.remove("many"))
        while (await slot.execute("ls many | wc -l")).output == "40000\n":
            pass
        snapshot = await ground.backend.seal(slot)
        before = await (await ground.fork(snapshot)).execute("ls -A; ls many | wc -l")
        more.set()
        ended = r"ended while (a file was being written to it|its files were being removed)"
        for work in (upload, removal):
            with pytest.raises(SlotLost, match=ended):
                await work
        after = await (await ground.fork(snapshot)).execute("ls -A; ls many | wc -l")
        assert after.output == before.output
        assert after.output.split()[:-1] == ["conf", "empty", "linked", "many", "src", "tests"]
        assert 0 < int(after.output.split()[-1]) < 40000

    ground.run(body())


def test_snapshots_of_another_server_mean_nothing_here(ground: Ground) -> None:
    async def body() -> None:
        async with LocalBackend() as other:
            with pytest.raises(SandboxError, match="layer-"):
                await other.create(SlotSpec(), "x", ground.base)

    ground.run(body())


def test_a_former_holder_is_refused(ground: Ground) -> None:
    async def body() -> None:
        slot = await ground.fork(ground.base)
        await ground.backend.destroy(slot)
        slot.released = False  # as in a client that does not know of the end
        for call in (slot.execute("true"), slot.read_bytes("f"), slot.write_bytes("f", b""), slot.changes()):
            with pytest.raises(StaleLease):
                await call

    ground.run(body())


def test_a_file_is_known_to_be_single_only_without_further_names(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute("echo a > prepared")
        prepared = await backend.seal(slot)
        slot = await backend.create(prepared.spec, "next", prepared)
        await slot.execute(
            "echo b > one; echo c > two; ln two three; ln prepared four; echo d > five; ln five /var/tmp/six"
        )
        await slot.execute("ln -s one link; mkdir folder; echo e > seven; ln seven folder/eight; rm folder/eight")
        sealed = await backend.seal(slot, View(without=("/workspace/one",)))
        single = {each.path for each in await backend.changes(sealed) if each.single}
        assert single == {"/workspace/seven"}
        await backend.forget(sealed)
        await backend.forget(prepared)

    on_each_rung(body)
