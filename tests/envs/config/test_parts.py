"""Settings that packages declare beside what they configure: every spelling, every source, and what a record has."""

import copy
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra.cli.main import main
from palaestra.envs.config.command_line import Answer, CommandLine, Parsed
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.tools.settings import ToolSettings
from palaestra_slots.core.config import all_settings
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig

LINE = CommandLine(prog="x", env_type=HermesAgentEnvConfig, server_type=APIServerConfig, command="process")
Run = Parsed[HermesAgentEnvConfig, APIServerConfig]


def parse(*argv: str, recorded: dict[str, JSON] | None = None, **environ: str) -> Run:
    parsed = LINE.parse(argv, environ, recorded=recorded)
    assert isinstance(parsed, Parsed)
    return parsed


@pytest.mark.parametrize(
    "words",
    ["--env.web_provider exa", "--env.web-provider exa", "--env.web.provider exa", "--web.provider exa"],
)
def test_a_flag_is_spelled_flat_or_nested(words: str) -> None:
    run = parse(*words.split())
    assert (run.env_config.web_provider, run.sources["env.web_provider"]) == ("exa", "command line")
    assert run.env_config.recorded()["web_provider"] == "exa"


@pytest.mark.parametrize("text", ["env: {web: {urls: {exa: U}}}", "env: {web_urls: {exa: U}}"])
def test_a_file_is_spelled_flat_or_nested(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    config = parse("--config", str(tmp_path / "run.yaml"), "--web.urls.searxng", "V").env_config
    assert config.web_urls == {"exa": "U", "searxng": "V"}


def test_a_name_that_does_not_begin_with_its_part_is_spelled_below_it() -> None:
    run = parse("--nomad.driver", "raw_exec", "--env.nomad.address", "http://n:1", "--backend", "nomad")
    assert (run.env_config.driver, run.env_config.nomad_address) == ("raw_exec", "http://n:1")
    run.env_config.check_runnable(run.sources)
    other = parse("--nomad.driver", "raw_exec")
    with raises(ConfigError, "driver"):
        other.env_config.check_runnable(other.sources)
    with pytest.raises(ConfigError, match="modal_gpu"):
        ToolSettings(modal_gpu="T4")


def test_variables_and_arguments_set_them() -> None:
    config = parse(PALAESTRA_ENV_MOA_MODELS="a,b", TAVILY_API_KEY="k").env_config
    assert (config.moa_models, config.web_api_keys) == (["a", "b"], {"tavily": "k"})
    taken = LINE.take("process", {"web": {"provider": "exa"}, "moa_models": ["a"]}).env_config
    assert (taken.web_provider, taken.moa_models) == ("exa", ["a"])
    assert HermesAgentEnvConfig(web={"provider": "exa"}).web_provider == "exa"
    assert ToolSettings(rl_dir="runs").rl_dir == "runs"


@pytest.mark.parametrize(
    ("words", "near"),
    [
        ("--env.web_provder exa", "--env.web_provider"),
        ("--web.provder exa", "--env.web_provider"),
        ("--env.browser_alow x", "--env.browser_allow"),
    ],
)
def test_a_misspelt_name_is_refused_with_a_near_one(words: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown flag .*{near}"):
        parse(*words.split())


@pytest.mark.parametrize("text", ["env: {web: {provder: exa}}", "env: {web_provder: exa}", "env: {web: exa}"])
def test_a_wrong_key_of_a_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match="web"):
        parse("--config", str(tmp_path / "run.yaml"))


@pytest.mark.parametrize(
    "words",
    ["--web.provider yahoo", "--env.web_concurrency 0", "--env.browser_snapshot_chars yes", "--browser.allow exa,mp:x"],
)
def test_a_wrong_value_is_refused_by_the_name_that_was_written(words: str) -> None:
    with pytest.raises(ConfigError, match=words.split()[0]):
        parse(*words.split())


def test_a_configuration_behaves_as_if_it_had_the_fields() -> None:
    config = HermesAgentEnvConfig(web_provider="exa")
    assert (config.model_fields_set, config.moa_timeout_s) == ({"web_provider"}, 180)
    config.web_urls["exa"] = "U"
    config.vision_model = "m"
    for each in (config, config.model_copy(), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert (each.web_provider, each.web_urls, each.vision_model) == ("exa", {"exa": "U"}, "m")
    assert config.model_copy(update={"web_provider": "brave"}).web_provider == "brave"
    assert not hasattr(config, "web_provder")
    with pytest.raises(ValueError, match="web_provder"):
        config.web_provder = "exa"


def test_a_class_may_declare_a_setting_again() -> None:
    class Own(HermesAgentEnvConfig):
        web_provider: str = "brave"

    assert Own().web_provider == "brave"
    assert Own(web_provider="exa").web_provider == "exa"
    assert Own(web={"provider": "exa"}).web_provider == "exa"


def test_a_resumed_run_reads_records_of_every_version() -> None:
    earlier = HermesAgentEnvConfig(web_provider="exa", seed=3).recorded() | {"moa_models": []}
    sources = {f"env.{name}": "command line" if name in ("web_provider", "seed") else "default" for name in earlier}
    run = parse(recorded={"env": earlier, "sources": sources})
    assert (run.env_config.web_provider, run.env_config.seed) == ("exa", 3)
    assert run.sources["env.web_provider"] == "the recorded run"


def test_help_lists_each_setting_once_in_the_whole_or_by_a_name() -> None:
    whole = help_of()
    row = re.compile(r"^  (?:--\w+, )?--env\.(\w+)", re.M)
    here = row.findall(whole)
    names = re.findall(r"(?m)^  (\w+) ", whole.partition("Further settings")[2])
    elsewhere = [found for name in names for found in row.findall(help_of(name))]
    assert {"web", "modal", "trackers"} <= {*names}
    assert len(here) + len(re.findall(r"(?m)^  --openai", whole)) <= 90
    assert sorted([*here, *elsewhere]) == sorted(all_settings(HermesAgentEnvConfig))
    with raises(ConfigError, "moa"):
        help_of("mao")


def help_of(*names: str) -> str:
    text = LINE.parse(["--help-all", *names], {})
    assert isinstance(text, Answer)
    return text.text


ENVIRONMENT = """
from palaestra import Task, environment

@environment
def played():
    yield Task(id="t", prompt="go")

@played.score
async def right(task, sandbox):
    return 1.0
"""


@pytest.mark.slow
@pytest.mark.slots
def test_the_record_of_a_run_hides_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    assert main(["run", "env.py", "--policy", "noop", "--web.api_keys", "exa=geheim77", "--vision.model", "m"]) == 0
    written = [each.read_bytes() for each in (tmp_path / "runs").rglob("*") if each.is_file()]
    assert not any(b"geheim77" in each for each in written)
    assert any(b'"vision_model":"m"' in each for each in written)


@pytest.mark.slow
@pytest.mark.slots
def test_a_run_that_sets_no_setting_of_a_part_imports_none(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    code = (
        "import sys; from palaestra.cli.main import main; main(['run', 'env.py', '--policy', 'noop']);"
        "print(sorted(name for name in sys.modules if name.endswith('settings')), file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    (imported,) = found.stderr.splitlines()[-1:]
    assert "palaestra.tools.settings" in imported
    assert not re.search("palaestra_(toolsets|cloud)", imported)


def test_every_setting_of_a_part_is_described() -> None:
    assert all(field.description for field in all_settings(HermesAgentEnvConfig).values())


@pytest.mark.parametrize(
    ("recorded", "flags", "type_", "model"),
    [
        ("scripted", "--base-url http://h/v1 --model m", "openai", "m"),
        ("scripted", "", "scripted", "oracle"),
        ("scripted", "--env.seed 3", "scripted", "oracle"),
        ("vllm", "--base-url http://h/v1", "vllm", "oracle"),
        ("vllm", "--model m", "vllm", "m"),
    ],
)
def test_a_server_takes_the_place_of_a_recorded_policy(recorded: str, flags: str, type_: str, model: str) -> None:
    server = APIServerConfig(server_type=recorded, model_name="oracle").recorded()
    sources = {f"openai.{name}": "command line" for name in server}
    run = parse(*flags.split(), recorded={"env": {}, "openai": [server], "sources": sources})
    assert (run.server_configs[0].server_type, run.server_configs[0].model_name) == (type_, model)
