"""A run that searches the web, from the command line: recorded, played again and trained on when the web is gone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pages.site import DOCUMENTS, Site, pages, searxng
from palaestra.cli.main import main
from palaestra.rollouts.journal.reader import open_recording
from palaestra.tools.settings import WEB_KEYS, WEB_URLS

BIRDS = """
from palaestra import Task, ToolStep, environment

@environment(toolsets=["web"])
def birds(word: str = "tern", page: str = ""):
    for i in range(2):
        steps = [ToolStep("web_search", {"query": word}), ToolStep("web_search", {"query": word, "limit": 1})]
        steps += [ToolStep("web_extract", {"urls": [page]})] if page else []
        yield Task(id=f"bird-{i}", prompt="Which bird dives for fish?", solution=steps)

@birds.score
async def seen(rollout):
    return "birds.example" in str(rollout.messages[1:])
"""

GRADED = """
from palaestra import HermesAgentBaseEnv, HermesAgentEnvConfig, APIServerConfig

class Graded(HermesAgentBaseEnv):
    name = "graded"

    @classmethod
    def config_init(cls):
        return HermesAgentEnvConfig(enabled_toolsets=["terminal"], group_size=2, total_steps=1), [APIServerConfig()]

    async def setup(self):
        self.left = [1]

    async def get_next_item(self):
        return {"id": "one", "prompt": "Say something", "solution": "true"} if self.left else None

    def format_prompt(self, item):
        return item["prompt"]

    async def prepare_group(self, item, exec_tool):
        found = await exec_tool("web_search", {"query": "owl"})
        await exec_tool("write_file", {"path": "owl.txt", "content": found.output})

    async def compute_reward(self, item, result, ctx):
        assert "The owl" in ctx.read_file("owl.txt")["content"]
        first, second = ctx.web_search("heron"), ctx.web_search("heron")
        return float(first == second and first["data"]["web"][0]["title"] == "The heron")

    async def evaluate(self, *args, **kwargs):
        return {}
"""


@pytest.fixture(autouse=True)
def without_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have keys."""
    for variable in [*WEB_KEYS.values(), *WEB_URLS.values()]:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "birds_env.py").write_text(BIRDS)
    (tmp_path / "graded_env.py").write_text(GRADED)
    return tmp_path


@pytest.fixture
def engine() -> Iterator[Site]:
    with Site(searxng()) as running:
        yield running


def palaestra(*argv: object) -> int:
    return main(list(map(str, argv)))


def run(folder: Path, *flags: object, env: str = "birds_env.py", policy: str = "oracle") -> tuple[int, Path]:
    """Run the environment; its exit code, and the folder of the run."""
    before = set((folder / "runs").glob("*/*"))
    code = palaestra("run", env, "process", "--policy", policy, "--group", 2, *flags)
    (made,) = set((folder / "runs").glob("*/*")) - before
    return code, made


def told(made: Path) -> list[list[str]]:
    """What the tools of each rollout said."""
    return [
        [str(message["content"]) for message in trajectory.messages if message["role"] == "tool"]
        for group in open_recording(made)
        for trajectory in group.trajectories
    ]


@pytest.mark.slots
def test_a_recorded_run_plays_again_without_the_web(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Site(searxng()) as engine, Site(pages()) as site:
        flags = ["--env.web_urls", f"searxng={engine.url}", "--env.web_allow", "127.0.0.1"]
        code, made = run(folder, *flags, "--env.page", site.url + "/article")
        asked = len(engine.seen) + len(site.seen)
    assert code == 0
    assert asked == 2 * 2 * 3
    lines = [json.loads(line) for line in (made / "world.jsonl").read_text().splitlines()]
    assert len(lines) == asked
    assert {line["tool"] for line in lines} == {"web_search", "web_extract"}
    assert all(DOCUMENTS[1][1] in said[0] and "shallow water" in said[2] for said in told(made))
    capsys.readouterr()
    assert palaestra("replay", made, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["observations"] == said["equal"] == asked
    assert said["rewards"] == said["rewards_equal"] == 4

    (made / "world.jsonl").unlink()
    assert palaestra("replay", made) == 1
    assert "world.jsonl does not exist" in capsys.readouterr().out


@pytest.mark.slots
def test_a_new_run_trains_on_what_another_recorded(folder: Path, engine: Site) -> None:
    code, first = run(folder, "--env.web_urls", f"searxng={engine.url}")
    assert code == 0
    asked = len(engine.seen)
    code, second = run(folder, "--env.world", "replay", "--env.world_file", first, "--env.seed", 1)
    assert code == 0
    assert len(engine.seen) == asked, "nobody was asked"
    assert told(second) == told(first)
    code, third = run(folder, "--env.world", "replay", "--env.world_file", second / "world.jsonl", "--env.word", "owl")
    assert code == 0
    assert all("recorded" in reply for said in told(third) for reply in said)
    flags = ["--env.world_miss", "fail", "--env.word", "owl"]
    code, fourth = run(folder, "--env.world", "replay", "--env.world_file", first, *flags)
    assert code == 3
    blamed = [one.blame for group in open_recording(fourth) for one in group.trajectories]
    assert [blame.value for blame in blamed if blame is not None] == ["tool"] * 4


@pytest.mark.slots
def test_a_shared_recording_is_filled_by_the_runs_that_use_it(folder: Path, engine: Site) -> None:
    flags = ["--env.world", "fill", "--env.world_file", "shared.jsonl", "--env.web_urls", f"searxng={engine.url}"]
    assert run(folder, *flags)[0] == 0
    assert len(engine.seen) == 2, "each of the two searches once, for four rollouts"
    code, second = run(folder, *flags, "--env.word", "owl")
    assert (code, len(engine.seen)) == (0, 4)
    code, third = run(folder, *flags, "--env.word", "owl")
    assert (code, len(engine.seen)) == (0, 4)
    assert told(third) == told(second)


@pytest.mark.slots
def test_what_hooks_look_up_with_tools_plays_again_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Site(searxng()) as engine:
        code, made = run(folder, "--env.web_urls", f"searxng={engine.url}", env="graded_env.py")
        assert len(engine.seen) == 5, "once to prepare the group, twice to score each rollout"
    assert code == 0
    assert palaestra("replay", made) == 0
    assert "rewards       2 of 2 equal" in capsys.readouterr().out


@pytest.mark.slots
def test_nothing_is_kept_of_a_run_that_is_live(folder: Path, engine: Site) -> None:
    code, made = run(folder, "--env.world", "live", "--env.web_urls", f"searxng={engine.url}")
    assert (code, len(engine.seen)) == (0, 8)
    assert not (made / "world.jsonl").exists()


@pytest.mark.slots
def test_a_key_is_neither_recorded_nor_needed_again(
    folder: Path, engine: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEARXNG_URL", engine.url)
    monkeypatch.setenv("BRAVE_API_KEY", "a-secret-key")
    code, made = run(folder, "--env.web_provider", "searxng")
    assert code == 0
    assert all(b"a-secret-key" not in path.read_bytes() for path in made.iterdir())
    monkeypatch.delenv("SEARXNG_URL")
    assert palaestra("replay", made) == 0


def test_a_recording_that_is_not_there_is_an_error_before_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["process", "--policy", "oracle", "--env.world", "replay"]
    assert palaestra("run", "birds_env.py", *flags) == 2
    assert "needs world_file" in capsys.readouterr().err
    assert palaestra("run", "birds_env.py", *flags, "--env.world_file", "none.jsonl") == 2
    assert "none.jsonl does not exist" in capsys.readouterr().err
    assert not (folder / "runs").exists()


def test_the_list_of_tools_knows_the_keys_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TAVILY_API_KEY", "k")
    assert palaestra("tools", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    missing = {tool["name"]: tool["missing"] for tool in said["tools"]}
    assert missing["web_search"] is None
    (web,) = [each for each in said["toolsets"] if each["name"] == "search"]
    assert web["available"]
    monkeypatch.delenv("TAVILY_API_KEY")
    assert palaestra("tools", "--json") == 0
    missing = {tool["name"]: tool["missing"] for tool in json.loads(capsys.readouterr().out)["tools"]}
    assert "TAVILY_API_KEY" in missing["web_search"]
