"""`palaestra batch` as a data team uses it: rows in, conversations out, nothing lost and nothing paid for twice."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from golden_messages import check_message, raises
from palaestra import open_run
from palaestra.cli.main import main
from palaestra_chat.batch.json_schema import NOT_JSON, JsonSchema
from palaestra_contract.tools.catalog import get_all_tool_names
from palaestra_slots.core.errors import ConfigError
from prompts.answering import answering, asked, bodies

KILLS = int(os.environ.get("PALAESTRA_KILLS", "4"))
"""How often a batch is killed."""

TIMEOUT_S = 100
TOOLS = ("--toolsets", "terminal", "--env.allow_network", "false")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[str]:
    with answering(folder / "asked.log") as url:
        yield url


def batch(*words: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "palaestra", "batch", *map(str, words)],
        capture_output=True,
        text=True,
        input=stdin,
        timeout=TIMEOUT_S,
    )


def of(url: str) -> tuple[str, ...]:
    return ("--base_url", url, "--model", "m", *TOOLS)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def prompts(numbers: Iterable[int]) -> list[dict[str, object]]:
    return [{"prompt": f"Do number {number}"} for number in numbers]


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slots
def test_rows_become_conversations(folder: Path, server: str) -> None:
    file = write(folder / "p.jsonl", *prompts(range(7)))
    done = batch(f"--dataset_file={file}", "--batch_size", 3, "--run_name", "first", "--num_workers=4", *of(server))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "data/first\n"
    made = rows(folder / "data/first/trajectories.jsonl")
    assert [row["prompt_index"] for row in made] == list(range(7))
    assert [row["metadata"]["batch_num"] for row in made] == [0, 0, 0, 1, 1, 1, 2]
    assert [len(rows(folder / f"data/first/batch_{number}.jsonl")) for number in range(3)] == [3, 3, 1]
    assert set(made[0]) == {
        "prompt_index", "conversations", "metadata", "completed", "partial", "api_calls", "toolsets_used",
        "tool_stats", "tool_error_counts", "reasoning_stats",
    }  # fmt: skip
    assert [row["api_calls"] for row in made] == [1, 2, 3, 1, 2, 3, 1]
    assert all(set(get_all_tool_names()) <= set(row["tool_stats"]) for row in made)
    assert len({tuple(row["tool_stats"]) for row in made}) == 1, "the lines load as one table"
    assert made[2]["tool_stats"]["terminal"] == {"count": 2, "success": 2, "failure": 0}
    said = [turn["from"] for turn in made[2]["conversations"]]
    assert said == ["system", "human", "gpt", "tool", "gpt", "tool", "gpt"]
    assert "2 1" in made[2]["conversations"][5]["value"], "the command ran"
    statistics = json.loads((folder / "data/first/statistics.json").read_text())
    assert statistics["tool_statistics"]["terminal"]["count"] == 4
    assert statistics["total_batches"] == 3
    assert json.loads((folder / "data/first/checkpoint.json").read_text())["completed_prompts"] == list(range(7))


@pytest.mark.slots
def test_a_named_batch_is_found_like_any_run(folder: Path, server: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(folder / "p.jsonl", *prompts(range(2)))
    assert batch(file, "--run-name", "first2", *of(server)).returncode == 0
    done = batch(file, "--run-name", "first", "--require", "reasoning", *of(server))
    assert done.returncode == 0
    assert "reward" not in done.stderr, "nothing is graded"
    assert "samples 1 kept, 1 discarded" in done.stderr
    assert ": kept 1" not in done.stderr, "the samples have no line each"
    assert main(["runs"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert (first.split()[:3], second.split()[:3]) == (["first", "done", "batch"], ["first2", "done", "batch"])
    assert "kept 0.500" in first
    for name in ("first", "last", "data/first"):
        assert open_run(name).path == folder / "data/first"
    assert open_run("last:2").path == folder / "data/first2"
    assert main(["status", "first"]) == 0
    assert "reward" not in capsys.readouterr().out


def test_a_batch_without_a_model_names_the_policies_without_one(folder: Path) -> None:
    done = batch(write(folder / "p.jsonl", *prompts(range(1))))
    assert done.returncode == 2
    assert "--policy noop" in done.stderr


@pytest.mark.slots
def test_a_bad_row_fails_alone(folder: Path, server: str) -> None:
    file = write(folder / "p.jsonl", {"prompt": "Do 0"}, "{not json", {"text": "x"}, {"prompt": 7}, {"prompt": "Do 3"})
    done = batch(file, "--run-name", "bad", "--env.max_failures", 9, *of(server))
    assert [row["prompt_index"] for row in rows(folder / "data/bad/trajectories.jsonl")] == [0, 4]
    failed = rows(folder / "data/bad/discarded.jsonl")
    assert [(row["prompt_index"], row["kind"]) for row in failed] == [(1, "failed"), (2, "failed"), (3, "failed")]
    assert "'prompt'" in failed[1]["reason"]
    assert "'text'" in failed[1]["reason"], done.stderr


@pytest.mark.slots
def test_rows_name_images_in_their_own_folder_only(folder: Path, server: str) -> None:
    (folder / "outside").symlink_to("/usr")
    images = ["--privileged", "/usr", "./outside", "../", "a b", "./here"]
    file = write(folder / "p.jsonl", *[{"prompt": "Do 0", "image": image} for image in images])
    batch(file, "--run-name", "images", "--env.max_failures", 9, *of(server))
    failed = {row["prompt_index"]: str(row["reason"]) for row in rows(folder / "data/images/discarded.jsonl")}
    assert sorted(failed) == [0, 1, 2, 3, 4, 5]
    for number in range(5):
        check_message(failed[number], repr(images[number]))
    assert "'./here' does not exist" in failed[5]


@pytest.mark.slots
def test_bad_rows_are_gathered_by_cause(folder: Path, server: str) -> None:
    file = write(
        folder / "p.jsonl", *[{"prompt": number} for number in range(5)], *[{"text": "x"}] * 4, {"prompt": "Do 0"}
    )
    done = batch(file, *of(server))
    check_message(done.stderr, "5 groups", "000000-0-")
    check_message(done.stderr, "4 groups", "000005-5-")
    assert done.stderr.count("column 'prompt'") == 4, "each cause when it comes first and at the end"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("p.jsonl", "q.jsonl"), "p.jsonl q.jsonl"),
        (("nope.jsonl",), "nope.jsonl"),
        (("empty.jsonl",), "empty.jsonl has no rows"),
        (("p.jsonl", "--max-samples", 0), "tasks is 0"),
    ],
)
def test_a_batch_that_cannot_begin_says_so_and_nothing_else(
    words: tuple[object, ...], named: str, folder: Path
) -> None:
    write(folder / "p.jsonl", *prompts(range(1)))
    write(folder / "empty.jsonl")
    done = batch(*words, "--policy", "noop", "--run-name", "x")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert named in done.stderr
    assert not (folder / "data").exists() or not (folder / "data/x").exists()


@pytest.mark.slots
def test_a_changed_file_ends_a_resumed_batch_with_its_row(folder: Path, server: str) -> None:
    file = write(folder / "p.jsonl", *prompts(range(2)))
    assert batch(file, "--run-name", "first", *of(server)).returncode == 0
    write(file, *prompts([0, 7, 2]))
    done = batch("--resume", "--run-name", "first")
    assert done.returncode == 2
    assert "row 1 of" in done.stderr
    assert "palaestra resume" not in done.stderr, "it would fail again"


@pytest.mark.slots
def test_equal_prompts_are_all_answered(folder: Path, server: str) -> None:
    file = write(folder / "p.jsonl", *[{"prompt": "Do 3"}] * 5)
    assert batch(file, "--run-name", "same", *of(server)).returncode == 0
    assert len(rows(folder / "data/same/trajectories.jsonl")) == 5
    assert asked(folder / "asked.log") == {("Do 3", 0): 5}


@pytest.mark.slots
def test_discarded_samples_are_recorded_and_not_asked_again(folder: Path, server: str) -> None:
    file = write(folder / "p.jsonl", *prompts(range(8)))
    words = (file, "--run-name", "wise", "--require", "reasoning", "known_tools", *of(server))
    assert batch(*words).returncode == 0
    before = asked(folder / "asked.log")
    assert [row["prompt_index"] for row in rows(folder / "data/wise/trajectories.jsonl")] == [0, 4]
    refused = {row["prompt_index"]: row["reason"] for row in rows(folder / "data/wise/discarded.jsonl")}
    assert sorted(refused) == [1, 2, 3, 5, 6, 7]
    assert "tool" in refused[5]
    assert "reasoning" in refused[1]
    assert batch("--resume", "--run-name", "wise", file, *words[3:]).returncode == 0
    assert asked(folder / "asked.log") == before
    for form in ("openai", "sharegpt", "batch"):
        assert main(["export", "data/wise", "--to", form, "--out", f"{form}.jsonl"]) == 0
        assert len(rows(folder / f"{form}.jsonl")) == 2
    assert main(["export", "data/wise", "--to", "openai", "--all", "--out", "all.jsonl"]) == 0
    assert len(rows(folder / "all.jsonl")) == 8


@pytest.mark.slots
def test_a_judge_is_asked_once_and_what_it_refuses_is_discarded(
    folder: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    file = write(folder / "p.jsonl", *prompts(range(4)))
    words = (file, "--judge", "The number is even.", "--judge-model", "other", *of(server))
    assert batch(*words, "--run-name", "one").returncode == 0
    assert [row["prompt_index"] for row in rows(folder / "data/one/trajectories.jsonl")] == [0, 2]
    (refused,) = (each.trajectories[0] for each in open_run("data/one") if each.number == 1)
    assert refused.detail["judge"] == {"meets": False, "reason": "even {or not}"}

    def judged() -> int:
        return sum("You judge" in line for line in (folder / "asked.log").read_text().splitlines())

    before = judged()
    assert batch(*words, "--run-name", "two").returncode == 0
    assert (before, judged()) == (4, 4)


@pytest.mark.slots
def test_a_sample_is_tried_again_until_it_fits_the_schema(folder: Path, server: str) -> None:
    file = write(folder / "p.jsonl", {"prompt": "JSON 1"}, {"prompt": "Do 0"})
    (folder / "schema.json").write_text(
        '{"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}'
    )
    words = ("--schema", folder / "schema.json", "--tries", 3, "--run-name", "shaped", "--lean", *of(server))
    assert batch(file, *words).returncode == 0
    (kept,) = rows(folder / "data/shaped/trajectories.jsonl")
    assert json.loads(kept["conversations"][-1]["value"].strip("`json\n")) == {"n": 1}
    assert kept["tool_stats"] == {}
    assert "terminal" in json.loads((folder / "data/shaped/tools.json").read_text())
    reasons = [(row["prompt_index"], row["reason"]) for row in rows(folder / "data/shaped/discarded.jsonl")]
    assert reasons[0][0] == 0
    assert '"integer"' in reasons[0][1]
    assert reasons[1:] == [(0, "the last reply is not JSON"), *[(1, "the last reply is not JSON")] * 3]


@pytest.mark.parametrize("reply", ['{"a": NaN}', "Infinity", '{"a": [-Infinity]}'])
def test_a_reply_that_only_python_reads_is_not_json(reply: str) -> None:
    assert JsonSchema({}, "s.json").problem(reply) == NOT_JSON
    assert JsonSchema({}, "s.json").problem('{"a": 1.0}') == ""


def test_a_schema_for_samples_has_no_pattern_that_cannot_be_read() -> None:
    with raises(ConfigError, "s.json"):
        JsonSchema({"properties": {"a": {"pattern": "("}}}, "s.json")


@pytest.mark.slots
def test_equal_and_similar_conversations_are_kept_once_and_exported_once(folder: Path, server: str) -> None:
    words = " ".join(f"word{number}" for number in range(60))
    texts = (f"Do 0 {words}", f"Do 3 {words}", f"Do 0  {words.upper()}", "Do 0 nothing like it")
    file = write(folder / "p.jsonl", *({"prompt": text} for text in texts))
    for similarity, left in ((1, [0, 1, 3]), (0.7, [0, 3])):
        name = f"unique-{similarity}"
        assert batch(file, "--run-name", name, "--unique", similarity, *of(server)).returncode == 0
        assert [row["prompt_index"] for row in rows(folder / f"data/{name}/trajectories.jsonl")] == left
        assert main(["export", f"data/{name}", "--to", "openai", "--out", f"{name}.jsonl"]) == 0
        assert len(rows(folder / f"{name}.jsonl")) == len(left)
    refused = rows(folder / "data/unique-0.7/discarded.jsonl")
    assert [row["repeats"].split("-")[0] for row in refused] == ["000000", "000000"]
    assert main(["export", "data/unique-1", "--to", "openai", "--unique", "0.7", "--out", "again.jsonl"]) == 0
    assert len(rows(folder / "again.jsonl")) == 2


@pytest.mark.slots
def test_a_sample_that_repeats_another_is_tried_again(folder: Path, server: str) -> None:
    """The server has three answers to this prompt, and gives the last one from the third time on."""
    file = write(folder / "p.jsonl", *[{"prompt": "JSON 2"}] * 5)
    words = ("--unique", 1, "--tries", 3, "--num-workers", 1, "--run-name", "once", *of(server))
    assert batch(file, *words).returncode == 0
    assert [row["prompt_index"] for row in rows(folder / "data/once/trajectories.jsonl")] == [0, 1, 2]
    refused = [(row["prompt_index"], row["reason"]) for row in rows(folder / "data/once/discarded.jsonl")]
    assert refused == [(row, "its conversation repeats an earlier one") for row in (3, 3, 3, 4, 4, 4)]


@pytest.mark.slots
def test_what_goes_to_the_server(folder: Path, server: str) -> None:
    file = write(folder / "p.jsonl", {"prompt": "Do 1"})
    prefill = folder / "prefill.json"
    prefill.write_text(json.dumps([{"role": "user", "content": "Do 6"}, {"role": "assistant", "content": "Done."}]))
    flags = ("--ephemeral_system_prompt", "Secret rules.", "--prefill_messages_file", prefill, "--max_tokens", 77)
    flags += ("--providers_allowed", "a", "b", "--provider_sort", "price", "--reasoning_disabled", "--max_turns", 2)
    assert batch(file, "--run-name", "asked", *flags, *of(server)).returncode == 0
    body = bodies(folder / "asked.log")[0]
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]
    assert body["messages"][0]["content"] == "Secret rules."
    assert body["max_tokens"] == 77
    assert body["provider"] == {"only": ["a", "b"], "sort": "price"}
    assert body["reasoning"] == {"enabled": False}
    (row,) = rows(folder / "data/asked/trajectories.jsonl")
    assert "Secret rules." not in json.dumps(row["conversations"])


@pytest.mark.slots
def test_every_kind_of_file_and_stdin(folder: Path, server: str) -> None:
    (folder / "p.json").write_text(json.dumps([{"prompt": "Do 0"}, {"prompt": [{"role": "user", "content": "Do 3"}]}]))
    with (folder / "p.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["question"], ["Do 0"], ["Do 3"]])
    for name, file, more in (("json", "p.json", ()), ("csv", "p.csv", ("--prompt-field", "question")), ("in", "-", ())):
        done = batch(file, "--run-name", name, *more, *of(server), stdin='{"prompt": "Do 0"}\n{"prompt": "Do 3"}\n')
        assert done.returncode == 0, done.stderr
        assert len(rows(folder / f"data/{name}/trajectories.jsonl")) == 2


@pytest.mark.slots
def test_a_row_has_a_directory_of_its_own(folder: Path, server: str) -> None:
    file = write(folder / "p.jsonl", {"prompt": "Do 1", "cwd": "/srv/my app"})
    policy = folder / "solution.jsonl"
    assert batch(file, "--run-name", "cwd", *of(server)).returncode == 0
    assert not policy.exists()
    (row,) = rows(folder / "data/cwd/trajectories.jsonl")
    assert row["tool_stats"]["terminal"]["success"] == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "specify the file of prompts"),
        (("gone.jsonl", "--policy", "noop"), "gone.jsonl"),
        (("p.jsonl", "--polcy", "noop"), "Did you mean --policy"),
        (("p.jsonl", "--require", "wisdom", "--policy", "noop"), "require"),
        (("p.jsonl", "--run-name", "../x", "--policy", "noop"), "without a slash"),
        (("p.jsonl", "--resume"), "--run-name"),
        (("p.jsonl", "--resume", "--run-name", "none"), "none"),
        (("p.jsonl", "--distribution", "no_such", "--policy", "noop"), "no_such"),
    ],
)
def test_mistakes_are_explained_and_leave_nothing(folder: Path, words: tuple[str, ...], says: str) -> None:
    write(folder / "p.jsonl", *prompts(range(2)))
    done = batch(*words)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert not [*folder.glob("data/*"), *folder.glob("runs/*")]


@pytest.mark.slots
def test_a_name_is_used_once(folder: Path) -> None:
    write(folder / "p.jsonl", *prompts(range(2)))
    words = ("p.jsonl", "--run-name", "once", "--policy", "noop", *TOOLS)
    assert batch(*words).returncode == 0
    before = (folder / "data/once/journal.jsonl").read_bytes()
    done = batch(*words)
    assert done.returncode == 2
    assert "--resume" in done.stderr
    assert (folder / "data/once/journal.jsonl").read_bytes() == before


@pytest.mark.slots
def test_changed_rows_are_noticed_and_further_ones_are_added(folder: Path, server: str) -> None:
    file = write(folder / "p.jsonl", *prompts(range(3)))
    assert batch(file, "--run-name", "more", *of(server)).returncode == 0
    write(file, *prompts(range(5)))
    assert batch(file, "--resume", "--run-name", "more", *of(server)).returncode == 0
    assert [row["prompt_index"] for row in rows(folder / "data/more/trajectories.jsonl")] == [0, 1, 2, 3, 4]
    write(file, {"prompt": "Another"}, *prompts(range(1, 6)))
    done = batch(file, "--resume", "--run-name", "more", *of(server))
    assert done.returncode == 2
    assert "row 0 of" in done.stderr


def test_stdin_is_kept_unless_nothing_is_to_be_made(folder: Path) -> None:
    words = ("-", "--policy", "noop", *TOOLS)
    done = batch(*words, "--dry-run", stdin='{"prompt": "Do 1"}\n')
    assert done.returncode == 0, done.stderr
    assert [*folder.iterdir()] == []
    (folder / "data").write_text("in the way")
    done = batch(*words, stdin='{"prompt": "Do 1"}\n')
    assert done.returncode == 1
    assert "cannot write data/stdin-" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dry_run_estimates_the_cost(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(folder / "p.jsonl", {"prompt": "x" * 4_000_000}, {"prompt": "x" * 4_000_000})
    flags = ("--policy", "noop", "--max-turns", "2", "--max-tokens", "500000", "--dry-run")
    assert main(["batch", str(file), *flags, "--env.prompt_price", "1", "--env.completion_price", "2"]) == 0
    found = re.search(r"about (\S+) with one call .* (\S+) with 2 calls of 500000 tokens", capsys.readouterr().out)
    assert found
    least, most = map(float, found.groups())
    assert 2 <= least < 2.1  # two prompts of 1e6 tokens, and the tools
    assert 9 <= most < 9.2  # each is sent twice, with the first reply the second time
    assert not (folder / "runs").exists()


def test_distributions_are_listed(folder: Path) -> None:
    done = batch("--list_distributions")
    assert done.returncode == 0
    assert "terminal_only" in done.stdout


@pytest.mark.slots
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_anywhere_gives_the_same_rows_and_asks_nothing_twice(
    folder: Path, server: str, request: pytest.FixtureRequest
) -> None:
    """Only a request whose answer was not on the disk yet may be made again."""
    file = write(folder / "p.jsonl", *prompts(range(60)))
    assert batch(file, "--run-name", "whole", "--num-workers", 6, *of(server)).returncode == 0
    whole = [without_time(row) for row in rows(folder / "data/whole/trajectories.jsonl")]
    rng, kills, number = random.Random(5), 0, 0
    while kills < KILLS:
        name = f"killed-{number}"
        number += 1
        (folder / "asked.log").write_text("")
        resume: tuple[str, ...] = ()
        mine = 0
        while killed(file, name, server, resume, rng.uniform(0.05, 1.2)):
            kills += 1
            mine += 1
            resume = ("--resume",) if (folder / f"data/{name}/journal.jsonl").exists() else ()
        assert [without_time(row) for row in rows(folder / f"data/{name}/trajectories.jsonl")] == whole
        again = sum(count - 1 for count in asked(folder / "asked.log").values())
        assert again <= 6 * mine, "at most what was in flight is asked again"


def killed(file: Path, name: str, url: str, resume: tuple[str, ...], after_s: float) -> bool:
    """Run the batch and kill it so long after its journal began; False if it ended before."""
    command = [sys.executable, "-m", "palaestra", "batch", str(file), "--run-name", name, "--num-workers", "6"]
    journal = Path("data", name, "journal.jsonl")
    size = journal.stat().st_size if journal.exists() else 0
    with subprocess.Popen([*command, *of(url), *resume], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as run:
        while run.poll() is None and (journal.stat().st_size if journal.exists() else 0) <= size:
            time.sleep(0.01)
        try:
            run.wait(after_s)
        except subprocess.TimeoutExpired:
            os.kill(run.pid, signal.SIGKILL)
            run.wait()
            return True
    assert run.returncode == 0
    return False


def without_time(row: dict[str, object]) -> dict[str, object]:
    return row | {"metadata": {**row["metadata"], "timestamp": ""}}
