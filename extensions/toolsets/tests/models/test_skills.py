"""Skills: what is listed, read and changed, and what no path reaches."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra.tools.settings import ToolSettings
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Slot
from palaestra_toolsets.tools.skills import MAX_BYTES, Skills


async def no_slot() -> Slot:
    raise AssertionError("no slot is needed")


def call(folder: Path, tool: str, /, **arguments: JSON) -> JSON:
    registry = build_tool_registry(["skills"], settings=ToolSettings(skills_dir=str(folder)))
    return json.loads(asyncio.run(ToolRuntime(registry, no_slot, "t").handle(tool, arguments)))


def document(name: str, text: str = "Type make test.") -> str:
    return f"---\nname: {name}\ndescription: How to {name}\n---\n\n{text}\n"


def test_a_skill_is_made_found_read_changed_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "skills"
    made = call(folder, "skill_manage", action="create", name="run-tests", content=document("run-tests"))
    assert made["success"]
    call(folder, "skill_manage", action="create", name="read", content=document("read"), category="data")
    assert call(folder, "skills_list")["skills"] == [
        {"name": "run-tests", "description": "How to run-tests", "category": ""},
        {"name": "read", "description": "How to read", "category": "data"},
    ]
    assert [each["name"] for each in call(folder, "skills_list", category="data")["skills"]] == ["read"]
    more = {"name": "run-tests", "file_path": "scripts/all.sh"}
    call(folder, "skill_manage", action="write_file", file_content="make test\n", **more)
    call(folder, "skill_manage", action="patch", name="run-tests", old_string="make test", new_string="make check")
    viewed = call(folder, "skill_view", name="run-tests")
    assert "Type make check." in viewed["content"]
    assert viewed["files"] == ["SKILL.md", "scripts/all.sh"]
    assert call(folder, "skill_view", **more)["content"] == "make test\n"
    call(folder, "skill_manage", action="remove_file", **more)
    assert call(folder, "skill_view", name="run-tests")["files"] == ["SKILL.md"]
    call(folder, "skill_manage", action="edit", name="run-tests", content=document("run-tests", "New."))
    assert "New." in (folder / "run-tests" / "SKILL.md").read_text()
    call(folder, "skill_manage", action="delete", name="run-tests")
    assert [each["name"] for each in call(folder, "skills_list")["skills"]] == ["read"]


@pytest.mark.parametrize(
    ("header", "description"),
    [
        ("name: review\ndescription: Two axes: standards and spec", "Two axes: standards and spec"),
        ("name: review\ndescription: Use when: a # or {brace} comes", "Use when: a # or {brace} comes"),
        ('name: review\ndescription: "Quoted: text"', "Quoted: text"),
        ("name: review\ndescription: >\n  Two\n  lines", "Two lines"),
        ("name: review\ndescription: Read it\nmetadata:\n  author: me", "Read it"),
    ],
)
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_published_headers_are_read(header: str, description: str, start: str, tmp_path: Path) -> None:
    (tmp_path / "other-name").mkdir()
    (tmp_path / "other-name" / "SKILL.md").write_text(f"{start}---\n{header}\n---\nBody\n")
    (skill,) = call(tmp_path, "skills_list")["skills"]
    assert (skill["name"], skill["description"]) == ("review", description)
    assert "Body" in call(tmp_path, "skill_view", name="review")["content"]


def test_a_skill_without_a_usable_header_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, text in {"a": "no header", "b": "---\nname: [\n---\n", "c": "---\nname: c\n---\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "SKILL.md").write_text(text)
    for _ in range(3):
        assert call(tmp_path, "skills_list")["skills"] == []
    assert [record.getMessage().count(str(tmp_path)) for record in caplog.records] == [1, 1, 1]


@pytest.mark.parametrize(
    "path", ["../other/SKILL.md", "/etc/passwd", "a/../../x", ".lock", "link", "linked/SKILL.md", "a\0b"]
)
def test_no_path_leaves_its_skill(path: str, tmp_path: Path) -> None:
    skills = Skills(tmp_path / "skills")
    skills.create("one", document("one"))
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "skills" / "one" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "skills" / "one" / "linked").symlink_to(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for reply in (
        call(skills.folder, "skill_view", name="one", file_path=path),
        call(skills.folder, "skill_manage", action="write_file", name="one", file_path=path, file_content="x"),
        call(skills.folder, "skill_manage", action="remove_file", name="one", file_path=path),
    ):
        assert "error" in reply
        assert "secret" not in json.dumps(reply).replace(path, "")
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "secret").read_text() == "secret"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"action": "create", "name": "../x", "content": document("../x")}, "lowercase letters"),
        ({"action": "create", "name": "two", "content": document("two"), "category": "../y"}, "lowercase letters"),
        ({"action": "create", "name": "two", "content": "no header"}, "header"),
        ({"action": "create", "name": "two", "content": "---\nname: [\n---\n"}, "YAML"),
        ({"action": "create", "name": "two", "content": document("three")}, "two"),
        ({"action": "create", "name": "one", "content": document("one")}, "already"),
        ({"action": "create", "name": "two"}, "content is needed"),
        ({"action": "edit", "name": "two", "content": document("two")}, "no skill"),
        ({"action": "patch", "name": "one", "old_string": "e", "new_string": "x"}, "occurs"),
        ({"action": "patch", "name": "one", "old_string": "name: one", "new_string": "name: x"}, "one"),
        ({"action": "write_file", "name": "one", "file_path": "SKILL.md", "file_content": "x"}, "edit or patch"),
        ({"action": "remove_file", "name": "one", "file_path": "SKILL.md"}, "delete"),
        ({"action": "write_file", "name": "one", "file_path": "big", "file_content": "x" * (MAX_BYTES + 1)}, "bytes"),
    ],
)
def test_a_change_that_cannot_be_made_changes_nothing(arguments: dict[str, JSON], part: str, tmp_path: Path) -> None:
    skills = Skills(tmp_path)
    skills.create("one", document("one"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert part in call(tmp_path, "skill_manage", **arguments)["error"]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_without_a_folder_the_tools_are_missing_with_the_setting() -> None:
    registry = build_tool_registry(["skills"])
    assert set(registry.missing) == {"skills_list", "skill_view", "skill_manage"}
    assert all("skills_dir" in reason for reason in registry.missing.values())


def test_concurrent_changes_follow_each_other(tmp_path: Path) -> None:
    skills = Skills(tmp_path)
    skills.create("one", document("one", "0"))
    with ThreadPoolExecutor(8) as threads:
        for number in range(40):
            threads.submit(skills.write_file, "one", f"file-{number}", "x")
            threads.submit(skills.patch, "one", "description: How to one", f"description: How to one{number}")
    assert len(skills.view("one")["files"]) == 41
    assert skills.find("one").description.startswith("How to one")


def test_links_in_a_folder_of_others_lead_no_change_out_of_it(tmp_path: Path) -> None:
    folder, outside = tmp_path / "skills", tmp_path / "outside"
    (outside / "theirs").mkdir(parents=True)
    (outside / "theirs" / "SKILL.md").write_text(document("theirs"))
    (outside / "profile").write_text("kept")
    folder.mkdir()
    (folder / "data").symlink_to(outside)
    changes = [
        {"action": "create", "name": "new", "content": document("new"), "category": "data"},
        {"action": "edit", "name": "theirs", "content": document("theirs", "changed")},
        {"action": "patch", "name": "theirs", "old_string": "make", "new_string": "changed"},
        {"action": "write_file", "name": "theirs", "file_path": "a", "file_content": "x"},
        {"action": "delete", "name": "theirs"},
    ]
    for change in changes:
        assert "symbolic link" in call(folder, "skill_manage", **change)["error"], change
    (folder / ".lock").unlink()
    (folder / ".lock").symlink_to(outside / "profile")
    assert "error" in call(folder, "skill_manage", action="create", name="new", content=document("new"))
    assert (outside / "theirs" / "SKILL.md").read_text() == document("theirs")
    assert sorted(each.name for each in outside.rglob("*")) == ["SKILL.md", "profile", "theirs"]
    assert (outside / "profile").read_text() == "kept"
    assert "make test" in call(folder, "skill_view", name="theirs")["content"]
