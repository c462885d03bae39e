"""The patch tool in a real slot: both modes, all or nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from golden_messages import check_message
from palaestra_slots.core.types import JSON, Limits
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import SlotSpec
from tools.desk import Desk

if TYPE_CHECKING:
    from tools.desk import AtDesk

pytestmark = pytest.mark.slots


def test_replace_changes_one_place_and_reports_it(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.slot.write_text("a.py", "def f():\n    return 1\n", mode=0o755)
        reply = await desk.call("patch", mode="replace", path="a.py", old_string="return 1", new_string="return 2")
        assert reply == {
            "success": True,
            "diff": "--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n def f():\n-    return 1\n+    return 2\n",
            "files_modified": ["a.py"],
            "syntax_check": {"a.py": "ok"},
            "match": "exact",
            "replacements": 1,
        }
        assert await desk.slot.read_text("a.py") == "def f():\n    return 2\n"
        info = await desk.slot.stat("a.py")
        assert info.mode == 0o755

    at_desk(scenario)


def test_bytes_outside_the_edit_stay_as_they_are(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.slot.write_bytes("dos.txt", b"\xef\xbb\xbfone\r\ntwo \xe9\r\nthree")
        reply = await desk.call("patch", mode="replace", path="dos.txt", old_string="one\n", new_string="1\nI\n")
        assert reply["success"]
        assert await desk.slot.read_bytes("dos.txt") == b"\xef\xbb\xbf1\r\nI\r\ntwo \xe9\r\nthree"

    at_desk(scenario)


def test_a_loose_match_says_which_kind_it_was(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.slot.write_text("a.txt", "if x:\n\ty = 1\n")
        reply = await desk.call(
            "patch", mode="replace", path="a.txt", old_string="    y = 1\n", new_string="    y = 2\n"
        )
        assert reply["match"] == "indentation"
        assert await desk.slot.read_text("a.txt") == "if x:\n\ty = 2\n"

    at_desk(scenario)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"mode": "replace", "path": "a.txt"}, "needs old_string and new_string"),
        ({"mode": "patch"}, "needs patch"),
        ({"mode": "patch", "patch": "x", "old_string": "y"}, "does not accept old_string"),
        ({"mode": "replace", "path": "a.txt", "old_string": "", "new_string": "x"}, "use write_file"),
        ({"mode": "replace", "path": "a.txt", "old_string": "a", "new_string": "a"}, "the same"),
        ({"mode": "replace", "path": "a.txt", "old_string": "a", "new_string": "b"}, "2 times (at lines 1, 2"),
        ({"mode": "replace", "path": "a.txt", "old_string": "zebra", "new_string": "b"}, "not found"),
        ({"mode": "replace", "path": "b.txt", "old_string": "a", "new_string": "b"}, "b.txt does not exist"),
        ({"mode": "patch", "patch": "*** Begin Patch\n"}, "must end with"),
        ({"mode": "replace", "path": "a.txt", "old_string": 1, "new_string": "b"}, "must be string"),
    ],
)
def test_mistakes_change_nothing(at_desk: AtDesk, arguments: dict[str, JSON], part: str) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.slot.write_text("a.txt", "a\na\n")
        assert part in (await desk.call("patch", **arguments))["error"]
        assert await desk.slot.read_text("a.txt") == "a\na\n"

    at_desk(scenario)


PATCH = """*** Begin Patch
*** Update File: a.py
-x = 1
+x = (
*** Add File: new/b.txt
+hello
*** Delete File: c.txt
*** Move File: run.sh -> bin/run.sh
*** End Patch
"""


def test_a_patch_over_several_files_is_applied_and_reported(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.slot.write_text("a.py", "x = 1\n")
        await desk.slot.write_text("c.txt", "c\n")
        await desk.slot.write_text("run.sh", "true\n", mode=0o755)
        reply = await desk.call("patch", mode="patch", patch=PATCH)
        assert reply["files_modified"] == ["a.py"]
        assert reply["files_created"] == ["new/b.txt", "bin/run.sh"]
        assert reply["files_deleted"] == ["c.txt", "run.sh"]
        assert "never closed" in reply["syntax_check"]["a.py"]
        assert "--- /dev/null\n+++ b/new/b.txt\n@@ -0,0 +1 @@\n+hello\n" in reply["diff"]
        assert await desk.slot.read_text("new/b.txt") == "hello\n"
        assert await desk.slot.stat("c.txt") is None
        moved = await desk.slot.stat("bin/run.sh")
        assert moved.mode == 0o755

    at_desk(scenario)


def test_a_patch_that_fits_only_in_part_changes_nothing(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.slot.write_text("a.py", "x = 1\n")
        reply = await desk.call("patch", mode="patch", patch=PATCH)
        check_message(reply["error"], "c.txt")
        assert await desk.slot.read_text("a.py") == "x = 1\n"
        assert await desk.slot.stat("new") is None

    at_desk(scenario)


def test_when_a_write_fails_those_before_it_are_taken_back(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.slot.write_text("a.py", "x = 1\n")
        await desk.slot.write_text("file", "no directory\n")
        patch = PATCH.replace("new/b.txt", "file/b.txt").split("*** Delete")[0] + "*** End Patch"
        reply = await desk.call("patch", mode="patch", patch=patch)
        assert "Cannot write file/b.txt" in reply["error"]
        assert await desk.slot.read_text("a.py") == "x = 1\n"

    at_desk(scenario)


def test_one_file_by_two_names_is_refused(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        patch = "*** Begin Patch\n*** Add File: a\n+1\n*** Add File: ./a\n+2\n*** End Patch"
        assert "two different paths" in (await desk.call("patch", mode="patch", patch=patch))["error"]

    at_desk(scenario)


def test_two_names_of_one_file_are_noticed(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.slot.execute(
            "mkdir real && printf 'one\\ntwo\\n' > real/a.txt && ln -s real other && ln -s real/a.txt b.txt"
        )
        for name in ("other/a.txt", "b.txt"):
            edits = f"*** Update File: real/a.txt\n-one\n+1\n*** Update File: {name}\n-two\n+2"
            patch = f"*** Begin Patch\n{edits}\n*** End Patch"
            reply = await desk.call("patch", mode="patch", patch=patch)
            check_message(reply["error"], name)
            assert await desk.slot.read_text("real/a.txt") == "one\ntwo\n"

    at_desk(scenario)


async def test_files_get_their_content_back_when_the_disk_is_full() -> None:
    async with LocalBackend() as backend:
        slot = await backend.create(SlotSpec(limits=Limits(disk_bytes=1 << 20)), "small")
        await slot.write_text("/tmp/a.txt", "one\n")
        await slot.write_text("/tmp/b.txt", "two\n" + "x" * 700_000)
        edits = "*** Update File: /tmp/a.txt\n-one\n+1\n*** Update File: /tmp/b.txt\n-two\n+2"
        reply = await Desk(slot).call("patch", mode="patch", patch=f"*** Begin Patch\n{edits}\n*** End Patch")
        assert reply == {"error": "Cannot write /tmp/b.txt: No space left on device"}
        assert await slot.read_text("/tmp/a.txt") == "one\n"


def test_a_long_call_leaves_the_loop_to_others(at_desk: AtDesk) -> None:
    """Blocks that begin and end as the wanted one, each of which is compared."""
    text = "".join(f"start\nmid {number} {number * 7 % 13} words and words\nmid b\nend\n" for number in range(60_000))
    wanted = {"path": "a.txt", "old_string": "start\nmiddle x words and wordz\nmiddle q\nend\n", "new_string": "x"}

    async def scenario(desk: Desk) -> None:
        await desk.slot.write_text("a.txt", text)
        longest, call = 0.0, asyncio.ensure_future(desk.call("patch", mode="replace", **wanted))
        loop = asyncio.get_running_loop()
        while not call.done():
            before = loop.time()
            await asyncio.sleep(0.01)
            longest = max(longest, loop.time() - before)
        await asyncio.gather(call, return_exceptions=True)
        assert longest < 0.6

    at_desk(scenario)
