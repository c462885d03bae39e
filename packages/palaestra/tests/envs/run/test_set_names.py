"""Runs of two evaluation sets have the same names; each is addressed without doubt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded import rollout, write_run

from palaestra.cli.main import main
from palaestra.envs.run.run_table import table_rows
from palaestra.envs.run.set_file import SET_SCHEMA, EvaluationSet, Member, find_runs, write_set
from palaestra.rollouts.finished_run import open_run
from palaestra.rollouts.journal.reader import find_run, list_runs, run_name
from palaestra.rollouts.records import Group
from palaestra_slots.core.errors import ConfigError

OLD, NEW = "set--20260101T000000Z-aaaa", "set--20260102T000000Z-bbbb"


def make_set(name: str, *members: str, reward: float = 1.0, begun: int = 9) -> Path:
    folder = Path("runs", name)
    write_set(folder, EvaluationSet(SET_SCHEMA, str(Path.cwd()), [Member("e", [], each, name="e") for each in members]))
    for number, each in enumerate(members[:begun]):
        trajectories = [rollout(0, [], reward - number / 10, rollout_id=f"g{n}/0", group_id=f"g{n}") for n in range(9)]
        groups = [
            Group(group_id=f"g{n}", number=n, task_id=f"t{n}", trajectories=[one]) for n, one in enumerate(trajectories)
        ]
        write_run(folder / each, *groups, model=each.partition("--")[2].removesuffix("-2"))
    return folder


@pytest.fixture(autouse=True)
def _two_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_set(OLD, "e--m", "e--m-2", reward=0.5)
    make_set(NEW, "e--m", "e--m-2")


def test_a_run_in_two_sets_is_named_with_its_set() -> None:
    assert find_run(f"{OLD}/e--m") == Path("runs", OLD, "e--m")
    assert open_run(f"{NEW}/e--m").mean_reward == 1.0
    with pytest.raises(ConfigError) as caught:
        open_run("e--m")
    assert all(f"{name}/e--m" in str(caught.value) for name in (OLD, NEW))
    for folder in list_runs():
        assert find_run(run_name(folder)) == folder


def test_lists_and_tables_print_names_that_other_commands_take(capsys: pytest.CaptureFixture[str]) -> None:
    main(["runs", "--json"])
    ids = [each["id"] for each in json.loads(capsys.readouterr().out)]
    main(["runs"])
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    main(["runs", "--table"])
    rows = [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]]
    main(["status", OLD])
    stated = [line.split()[1].removesuffix(":") for line in capsys.readouterr().out.splitlines() if "with" in line][:1]
    assert sorted(ids) == sorted(listed) == sorted(rows)
    assert len(set(ids)) == 4
    assert {*map(find_run, [*ids, *stated])} == {*list_runs()}


def test_names_sets_and_folders_mean_the_same_runs_in_a_table_and_for_grade() -> None:
    make_set("set--20260103T000000Z-cccc", "e--m", "e--k", begun=1)
    for names in ([OLD], [f"{OLD}/e--m"], ["runs"], ["last"], [f"runs/{OLD}", OLD, str(Path("runs", OLD).resolve())]):
        rows, runs = table_rows(names), find_runs(names)
        assert [Path(row.run) for row in rows if row.state != "not run"] == runs
        assert len(rows) == len({Path(row.run).resolve() for row in rows})
    assert sum(row.state == "not run" for row in table_rows(["runs"])) == 1
    make_set("set--20260104T000000Z-dddd", "e--m", begun=0)
    with pytest.raises(ConfigError):
        find_runs(["set--20260104T000000Z-dddd"])


def test_runs_of_a_set_that_differ_only_in_settings_are_not_mixed_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", f"runs/{NEW}", f"runs/{OLD}", "--json"]) == 0
    pairs = [[Path(run["path"]) for run in each["runs"]] for each in json.loads(capsys.readouterr().out)["sets"]]
    assert pairs == [[Path("runs", name, member) for name in (NEW, OLD)] for member in ("e--m", "e--m-2")]
    make_set("set--20260103T000000Z-cccc", "e--m")
    assert main(["compare", f"runs/{NEW}", "runs/set--20260103T000000Z-cccc"]) == 2
    told = capsys.readouterr().err
    assert f"{NEW}/e--m" in told
    assert f"{NEW}/e--m-2" in told


def test_the_models_of_one_set_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    make_set("set--20260103T000000Z-cccc", "e--good", "e--bad", "e--worse")
    assert main(["compare", "set--20260103", "--json"]) == 0
    [line] = json.loads(capsys.readouterr().out)["sets"]
    assert [run["model"] for run in line["runs"]] == ["good", "bad", "worse"]
    make_set("set--20260104T000000Z-dddd", "e--m")
    assert main(["compare", "set--20260104"]) == 2
    assert main(["compare", f"{NEW}/e--m"]) == 2


def test_a_task_is_chosen_in_one_environment_of_a_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "a_env.py", "b_env.py", "--task", "x", "--policy", "oracle"]) == 2
    assert "beside the environment" in capsys.readouterr().err
    assert len(list_runs()) == 4
