"""What people say about rollouts: from the page, from scripts, in filters and in exports; and rewards graded again."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from recorded import embedded, rollout, sky, write_run

from palaestra.cli.main import main as palaestra
from palaestra.rollouts.annotations import ANNOTATIONS_NAME, annotation, read_annotations, write_annotations
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.journal.verify import verify_run
from palaestra.rollouts.records import Group
from palaestra.rollouts.regraded import GRADE_SCHEMA, GRADES_NAME, Grade, read_grades, write_grades

from .fixing import HOSTILE
from .test_page import chromium as chromium
from .test_page import go, see, unharmed, until
from .test_server import TOKEN, Caller, visit

if TYPE_CHECKING:
    from playwright.async_api import Page

FIRST = "000000-sky/0"


async def post(caller: Caller, body: Any, **headers: str | None) -> tuple[int, Any]:
    sent = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    sent |= {name.replace("_", "-"): each for name, each in headers.items()}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {name: each for name, each in sent.items() if each is not None}
    async with caller.http.post(f"{caller.url}/api/annotate", data=data, headers=sent) as response:
        return response.status, await response.json()


def test_only_the_viewers_page_and_its_owner_annotate(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", sky())
    body = {"run": "run", "id": FIRST, "tags": ["odd"]}

    async def scenario(caller: Caller) -> None:
        await caller.indexed("run", 4)
        cookie = f"palaestra_view_{caller.url.rpartition(':')[2]}={TOKEN}"
        refused: list[dict[str, str | None]] = [
            {"Authorization": None},
            {"Authorization": "Bearer wrong"},
            {"Authorization": None, "Cookie": cookie},  # without an origin, as a request of another program
            {"Authorization": None, "Cookie": cookie, "Origin": "http://evil.example"},
            {"Authorization": None, "Cookie": cookie, "Origin": "null"},
            {"Authorization": None, "Cookie": cookie, "Origin": "http://127.0.0.1:1"},
            {"Origin": "http://evil.example"},
            {"Sec_Fetch_Site": "cross-site"},
            {"Content_Type": "text/plain"},
            {"Content_Type": "application/x-www-form-urlencoded"},
            {"Host": "evil.example", "Origin": "http://evil.example"},
        ]
        for headers in refused:
            status, _ = await post(caller, body, **headers)
            assert status in (401, 403), headers
        assert not (run / ANNOTATIONS_NAME).exists()
        assert (await post(caller, body))[0] == 200
        assert (await post(caller, body, Authorization=None, Cookie=cookie, Origin=caller.url))[0] == 200
        async with caller.http.put(f"{caller.url}/api/annotate", headers={"Authorization": f"Bearer {TOKEN}"}) as reply:
            assert reply.status == 405

    visit(run, scenario)
    assert read_annotations(run).by_rollout[FIRST].tags == ["odd"]


def test_wrong_bodies_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", sky())

    async def scenario(caller: Caller) -> None:
        await caller.indexed("run", 4)
        good = {"run": "run", "id": FIRST}
        for body in (b"", b"[]", b"\xff", b"[" * 20_000, {**good}, {**good, "tags": "x"}, {**good, "more": 1},
                     {**good, "tags": ["a b"]}, {**good, "verdict": "cheat"}, {**good, "note": "x" * 10_001},
                     {**good, "id": "nobody", "tags": ["a"]}, {**good, "run": "../run", "tags": ["a"]},
                     {**good, "author": "root", "tags": ["a"]}):  # fmt: skip
            status, answer = await post(caller, body)
            assert (status, "detail" in answer) == (400, True), body
        assert (await post(caller, {**good, "note": "x" * 70_000}))[0] == 413

    visit(run, scenario)
    assert sorted(path.name for path in run.iterdir()) == ["journal.jsonl"]


def test_annotations_are_shown_filtered_and_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", sky())
    journal = (run / "journal.jsonl").read_bytes()

    async def scenario(caller: Caller) -> None:
        await caller.indexed("run", 4)
        _, answer = await post(caller, {"run": "run", "id": FIRST, "tags": ["odd", "slow"], "verdict": "hack"})
        assert answer["judgement"]["verdict"] == "hack"
        await post(caller, {"run": "run", "id": "000000-sky/1", "tags": ["odd"], "note": "Rome is <b>sunny</b>"})
        write_annotations(run, [annotation("000000-sky/2", "script", verdict="grader_mistake")])  # another process

        async def ids(*where: list[Any]) -> list[str]:
            rows = (await caller.get("rollouts", run="run", where=json.dumps(where)))["rows"]
            return [row["id"].rpartition("/")[2] for row in rows]

        for _ in range(200):
            if await ids(["verdict", "=", "grader_mistake"]):
                break
            await asyncio.sleep(0.02)
        assert await ids(["tag", "=", "odd"]) == ["0", "1"]
        assert await ids(["tag", "!=", "odd"]) == ["2", "3"]
        assert await ids(["tag", ":", "SL"]) == ["0"]
        assert await ids(["tag", "=", ""]) == ["2", "3"]
        assert await ids(["verdict", "=", "hack"]) == ["0"]
        assert await ids(["verdict", "=", ""]) == ["1", "3"]
        assert await ids(["note", ":", "rome"]) == ["1"]
        assert await ids(["tag", "=", "x' OR 1=1 --"]) == []
        assert (await caller.ask("/api/rollouts", {"run": "run", "where": '[["tag","<","a"]]'}))[0] == 400
        row = (await caller.get("rollouts", run="run"))["rows"][0]
        assert (row["tags"], row["verdict"], row["notes"], row["regraded"]) == (["odd", "slow"], "hack", 0, None)
        judged = (await caller.get("run", run="run"))["judged"]
        assert judged["tags"] == {"odd": 2, "slow": 1}
        assert judged["verdicts"] == {"hack": 1, "grader_mistake": 1}
        assert judged["regraded"] is None

    visit(run, scenario)
    assert (run / "journal.jsonl").read_bytes() == journal


def test_the_command_annotates_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_run(tmp_path / "run", sky()))
    assert palaestra(["annotate", run, FIRST, "sky/1", "--tag", "odd", "--author", "ada"]) == 0
    assert (
        palaestra(["annotate", run, "000000-sky/1", "--verdict", "hack", "--note", "tests\x1b[31m", "--author", "b"])
        == 0
    )
    capsys.readouterr()
    assert palaestra(["annotate", run]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[:2] == [f"{FIRST}  [odd]", "000000-sky/1: hack (b)  [odd]"]
    assert "\x1b" not in printed
    assert palaestra(["annotate", run, "000000-sky/1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "hack"
    for words, problem in (
        (["--tag", "odd"], "specify the rollouts"),
        (["nobody", "--tag", "odd"], "has no rollout 'nobody'"),
        (["000000-sky", "--tag", "odd"], "names 4 rollouts"),
        ([FIRST, "--verdict", "cheat"], "is not a verdict"),
    ):
        assert palaestra(["annotate", run, *words]) == 2
        assert problem in capsys.readouterr().err


def test_exports_carry_what_was_said(tmp_path: Path) -> None:
    group = sky()
    group.trajectories = group.trajectories[:2]
    run = write_run(tmp_path / "run", group)
    write_annotations(run, [annotation(FIRST, "ada", tags=["odd"], verdict="hack", note="Why?")])
    for name in ("openai", "sharegpt", "atif", "rows", "atropos", "batch"):
        out = tmp_path / f"{name}.jsonl"
        assert palaestra(["export", str(run), "--to", name, "--out", str(out)]) == 0
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        places = {"atif": lambda line: line["extra"]["palaestra"], "batch": lambda line: line["metadata"],
                  "atropos": lambda line: line["rollouts"][0]}  # fmt: skip
        said = places.get(name, lambda line: line)(lines[0]).get("annotations")
        assert said is not None, name
        assert (said["verdict"], said["tags"], said["notes"][0]["text"]) == ("hack", ["odd"], "Why?"), name
        assert "annotations" not in json.dumps(lines[-1:]) or len(lines) == 1, name


def test_exported_rows_with_annotations_are_still_those_of_the_journal(real: Path, tmp_path: Path) -> None:
    run = shutil.copytree(real, tmp_path / "run")
    write_annotations(run, [annotation("000000-count/0/0", "ada", tags=["odd"])])
    out = tmp_path / "rows.jsonl"
    assert palaestra(["export", str(run), "--to", "rows", "--out", str(out)]) == 0
    assert out.read_text().count("annotations") >= 1
    verdict = verify_run(run / "journal.jsonl", exported=out)
    assert verdict.ok, verdict.violation
    assert verdict.exported == len(out.read_text().splitlines())


def regrade(run: Path) -> None:
    """Give the first three rollouts of `sky` the rewards 0, 1 and 1, in place of 1, 0.25 and 0."""
    new = [Grade(schema=GRADE_SCHEMA, at=5.0, rollout_id=f"000000-sky/{n}", reward=float(n > 0)) for n in range(3)]
    write_grades(run, new)


@pytest.mark.parametrize("while_open", [False, True])
def test_every_figure_of_the_viewer_uses_the_new_scores(tmp_path: Path, while_open: bool) -> None:
    run = write_run(tmp_path / "run", sky())
    if not while_open:
        regrade(run)

    async def scenario(caller: Caller) -> None:
        summary = await caller.indexed("run", 4)
        if while_open:
            assert summary["reward"]["mean"] == pytest.approx(1.25 / 3)
            regrade(run)
            for _ in range(500):
                if (await caller.get("run", run="run"))["summary"]["reward"]["mean"] != summary["reward"]["mean"]:
                    break
                await asyncio.sleep(0.02)
        whole = await caller.get("run", run="run")
        rows = (await caller.get("rollouts", run="run", sort="reward"))["rows"]
        cells = (await caller.get("groups", run="run"))["groups"][0]["cells"]
        table = await caller.get("table", run="run")
        page = await caller.get("rollout", run="run", id="000000-sky/1")
        found = {
            "list of runs": (await caller.get("runs"))["runs"][0]["reward"]["mean"],
            "page of the run": whole["summary"]["reward"]["mean"],
            "scores": whole["scores"][0]["mean_reward"],
            "table": float(dict(zip(table["columns"], table["rows"][0]["cells"], strict=True))["mean reward"]),
            "rollouts": sum(row["reward"] or 0.0 for row in rows) / 3,
            "groups": sum(cell[2] or 0.0 for cell in cells) / 3,
        }
        assert found == {name: pytest.approx(2 / 3, abs=1e-3) for name in found}
        assert [row["reward"] for row in rows] == [0.0, 1.0, 1.0, None]
        assert [row["recorded"] for row in rows] == [1.0, 0.25, 0.0, None]
        assert page["reward"] == 1.0
        assert whole["summary"]["criteria"] == {}  # the new score of the first rollout has no metric

    visit(run, scenario)


def test_a_report_has_the_new_scores(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", sky())
    assert palaestra(["report", str(run)]) == 0
    regrade(run)
    out = tmp_path / "new.html"
    assert palaestra(["report", str(run), "--out", str(out)]) == 0
    means = [embedded(path)["answers"]["runs"]["runs"][0]["reward"]["mean"] for path in (run / "report.html", out)]
    assert means == [pytest.approx(1.25 / 3), pytest.approx(2 / 3)]


def test_files_from_before_and_after_a_regrade_are_proved(real: Path, tmp_path: Path) -> None:
    run, out = shutil.copytree(real, tmp_path / "run"), tmp_path / "rows"
    journal, groups = run / "journal.jsonl", run / "groups.jsonl"
    assert palaestra(["export", str(run), "--to", "rows", "--out", f"{out}-0"]) == 0
    ids = [each.rollout_id for group in Recording(journal) for each in group.trajectories]
    write_grades(
        run, [Grade(schema=GRADE_SCHEMA, at=5.0, rollout_id=each, reward=0.125 * n) for n, each in enumerate(ids)]
    )
    assert palaestra(["export", str(run), "--to", "rows", "--out", f"{out}-1"]) == 0
    assert palaestra(["export", str(run), "--to", "atropos", "--out", f"{out}-groups"]) == 0
    for place in (groups, Path(f"{out}-groups")):
        for rows in (Path(f"{out}-0"), Path(f"{out}-1")):
            verdict = verify_run(journal, place, rows)
            assert verdict.ok, verdict.violation
    write_grades(run, [Grade(schema=GRADE_SCHEMA, at=6.0, rollout_id=each, reward=0.75) for each in ids])
    assert not verify_run(journal, Path(f"{out}-groups")).ok
    assert not verify_run(journal, exported=Path(f"{out}-1")).ok


def test_rewards_that_were_graded_again_stand_next_to_the_recorded_ones(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", sky())
    for number, reward in enumerate((0.5, 0.25, None)):
        error = "" if reward is not None else "GraderError: lost"
        grade = Grade(
            schema=GRADE_SCHEMA, at=5.0, rollout_id=f"000000-sky/{number}", before=1.0, reward=reward, error=error
        )
        write_grades(run, [grade])
    with (run / GRADES_NAME).open("ab") as file:
        file.write(b"{torn")
    assert [grade.reward for grade in read_grades(run).values()] == [0.5, 0.25, None]

    async def scenario(caller: Caller) -> None:
        await caller.indexed("run", 4)
        again = (await caller.get("run", run="run"))["judged"]["regraded"]
        assert (again["rollouts"], again["changed"], again["failed"]) == (2, 1, 1)
        assert (again["before"]["mean"], again["after"]["mean"]) == (0.625, 0.375)

        async def ids(where: list[Any], **more: str) -> list[str]:
            rows = (await caller.get("rollouts", run="run", where=json.dumps([where]), **more))["rows"]
            return [row["id"].rpartition("/")[2] for row in rows]

        assert await ids(["changed", "=", 1]) == ["0"]
        assert await ids(["regraded", "<", 0.5]) == ["1"]
        assert await ids(["regraded", "!=", ""], sort="regraded") == ["1", "0"]
        found = await caller.get("judgement", run="run", id="000000-sky/2")
        assert found["grade"]["error"] == "GraderError: lost"

    visit(run, scenario)


def test_the_page_takes_tags_notes_and_verdicts(tmp_path: Path, chromium: str) -> None:
    run = write_run(tmp_path / "run", sky())
    write_grades(run, [Grade(schema=GRADE_SCHEMA, at=5.0, rollout_id=FIRST, before=1.0, reward=0.5)])

    async def look(page: Page, base: str) -> None:
        await go(page, base, "rollout", run="run", id=FIRST)
        facts = (await page.inner_text(".facts")).lower()
        assert "recorded reward" in facts
        assert "0.50" in facts
        await page.click("text=grader mistake")
        await page.wait_for_selector(".judgement .callout")
        await page.fill("[aria-label='Add a tag']", "odd slow")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".judgement .chip >> nth=1")
        await page.fill("[aria-label='Add a note']", "The check reads <b>one</b> city.")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".note-said")
        assert "<b>one</b>" in await page.inner_text(".note-said")
        await page.click("text=slow ×")
        await until(page, "document.querySelectorAll('.judgement .chip').length == 1")
        await go(page, base, "run", run="run")
        text = await page.inner_text("#main")
        assert "verdict: grader mistake 1" in text
        assert "1 rollout graded again" in text
        await page.click("text=tag: odd 1")
        await until(page, "document.querySelectorAll('a.row').length == 1")
        assert "grader mistake odd" in (await page.inner_text("a.row")).replace("\n", " ")
        await go(page, base, "run", run="run")
        await page.fill("[aria-label='Filter rollouts']", "verdict=none changed")
        await page.keyboard.press("Enter")
        await until(page, "document.querySelector('#main').innerText.includes('No rollout fits')")

    see(chromium, run, look)
    said = read_annotations(run).by_rollout[FIRST]
    assert (said.tags, said.verdict, len(said.notes)) == (["odd"], "grader_mistake", 1)


def test_hostile_annotations_do_nothing_in_page_and_file(tmp_path: Path, chromium: str) -> None:
    run = write_run(
        tmp_path / "run", Group(group_id="000000-sky", number=0, task_id="sky", trajectories=[rollout(0, [])])
    )
    write_annotations(run, [annotation(FIRST, HOSTILE[:200], note=HOSTILE, tags=["a"])])
    write_grades(run, [Grade(schema=GRADE_SCHEMA, at=5.0, rollout_id=FIRST, error=HOSTILE)])
    out = tmp_path / "run.html"
    assert palaestra(["view", str(run), "--html", str(out)]) == 0
    assert "window.broken" not in out.read_text()

    async def look(page: Page, base: str) -> None:
        for view in ("run", "rollout"):
            await go(page, base, view, run="run", id=FIRST)
            await unharmed(page)
        assert "<script>window.broken = 1</script>" in await page.inner_text(".note-said")

    see(chromium, run, look)


def test_a_link_in_the_place_of_the_file_is_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", sky())
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (run / ANNOTATIONS_NAME).symlink_to(victim)

    async def scenario(caller: Caller) -> None:
        await caller.indexed("run", 4)
        assert "cannot be read" in (await caller.get("run", run="run"))["judged"]["problem"]
        status, answer = await post(caller, {"run": "run", "id": FIRST, "tags": ["a"]})
        assert (status, "is a link" in answer["detail"]) == (400, True)

    visit(run, scenario)
    assert os.readlink(run / ANNOTATIONS_NAME) == str(victim)
    assert victim.read_text() == "mine"


SCRIPT = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def one_file():
    yield Task(id="one", prompt="Write a.", solution="echo 1 > a")

@one_file.score
async def written(sandbox):
    return float(await sandbox.read_text("a", missing="") == "WANTED\\n")
"""


@pytest.mark.slots
def test_the_command_grade_keeps_the_new_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(SCRIPT.replace("WANTED", "2"))
    assert palaestra(["run", "my_env.py", "--policy", "oracle", "--group", "2", "--keep-workspaces"]) == 0
    run = Path(capsys.readouterr().out.strip())
    journal = (run / "journal.jsonl").read_bytes()
    Path("my_env.py").write_text(SCRIPT.replace("WANTED", "1"))
    assert palaestra(["grade", str(run)]) == 0
    assert [(each.before, each.reward) for each in read_grades(run).values()] == [(0.0, 1.0)] * 2
    Path("my_env.py").write_text(SCRIPT.replace("WANTED", "2"))
    assert palaestra(["grade", str(run)]) == 0
    assert [(each.before, each.reward) for each in read_grades(run).values()] == [(0.0, 0.0)] * 2
    assert len((run / GRADES_NAME).read_bytes().splitlines()) == 2
    assert (run / "journal.jsonl").read_bytes() == journal
    (run / GRADES_NAME).unlink()
    (run / GRADES_NAME).mkdir()
    assert palaestra(["grade", str(run)]) == 2
    assert GRADES_NAME in capsys.readouterr().err
