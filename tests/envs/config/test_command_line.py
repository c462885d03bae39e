"""The command line of environment scripts, from words to validated settings."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from golden_messages import check_message, raises
from palaestra.envs.config.command_line import Answer, CommandLine, Parsed, set_fields
from palaestra.envs.config.fields import EvalHandlingEnum, HermesAgentEnvConfig
from palaestra_slots.core.errors import ConfigError
from palaestra_suites.swe.swe_smith_oracle import SweSmithOracleEnvConfig
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.server_group import ENGINES


class ToyConfig(HermesAgentEnvConfig):
    max_items: int = Field(default=0, description="Rows used, at most; 0 means all.")
    python_only: bool = Field(default=True, description="Leave other languages out.")


LINE = CommandLine(
    prog="python toy_env.py",
    env_type=ToyConfig,
    server_type=APIServerConfig,
    env_values=set_fields(ToyConfig(max_agent_turns=5)),
    server_values=[set_fields(APIServerConfig(model_name="own"))],
    about="A toy.\n\nMore.",
)

Run = Parsed[ToyConfig, APIServerConfig]


def parse(*argv: str, line: CommandLine[ToyConfig, APIServerConfig] = LINE, **environ: str) -> Run:
    parsed = line.parse(argv, environ)
    assert isinstance(parsed, Parsed)
    return parsed


def refusal(*argv: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        LINE.parse(argv, environ)
    assert caught.value.exit_code == 2
    return str(caught.value)


def answer(*argv: str, **environ: str) -> str:
    given_answer = LINE.parse(argv, environ)
    assert isinstance(given_answer, Answer)
    return given_answer.text


def test_the_documented_command_line() -> None:
    words = (
        "process --env.use_wandb false --env.total_steps 2 --env.group_size 4 --env.max_items 2 "
        "--env.tool_pool_mode local --policy oracle"
    )
    run = parse(*words.split())
    config = run.env_config
    assert (config.use_wandb, config.total_steps, config.group_size) == (False, 2, 4)
    assert (config.max_items, config.tool_pool_mode) == (2, "local")
    assert run.command == "process"
    assert run.policy == "oracle"
    assert [(s.server_type, s.model_name) for s in run.server_configs] == [("scripted", "oracle")]
    assert run.notices == ()


@pytest.mark.parametrize("words", [["--env.max_items", "-1"], ["--env.max_items=-1"]])
def test_negative_numbers_are_values(words: list[str]) -> None:
    assert parse("process", *words).env_config.max_items == -1


@pytest.mark.parametrize(
    ("words", "value"),
    [([], True), (["true"], True), (["false"], False), (["0"], False), (["no"], False)],
)
def test_booleans_with_and_without_a_value(words: list[str], value: bool) -> None:
    run = parse("process", "--env.python_only", *words, "--group", "2")
    assert run.env_config.python_only is value
    assert run.env_config.group_size == 2


@pytest.mark.parametrize(
    "words",
    [
        ["--env.enabled_toolsets", "terminal", "file"],
        ["--env.enabled_toolsets", "terminal,file"],
        ["--env.enabled_toolsets=terminal,file"],
        ["--env.enabled_toolsets", '["terminal", "file"]'],
        ["--env.enabled_toolsets", "terminal", "--env.enabled_toolsets", "file"],
        ["--env.enabled-toolsets", "terminal", "file"],
    ],
)
def test_lists_in_every_spelling(words: list[str]) -> None:
    assert parse("process", *words).env_config.enabled_toolsets == ["terminal", "file"]


@pytest.mark.parametrize(
    "words",
    [
        ["--env.extra_body", '{"provider": {"order": "x"}, "n": 1}'],
        ["--env.extra_body.provider.order", "x", "--env.extra_body.n", "1"],
        ["--env.extra_body", 'provider={"order": "x"}', "n=1"],
        ["--env.extra_body", "n=1", "--env.extra_body.provider.order=x"],
    ],
)
def test_mappings_in_every_spelling(words: list[str]) -> None:
    assert parse("process", *words).env_config.extra_body == {"provider": {"order": "x"}, "n": 1}


@pytest.mark.parametrize(
    "words",
    [
        ["--env.install_env", "X=9.9", "Y=true"],
        ["--env.install_env.X", "9.9", "--env.install_env.Y=true"],
        ["--env.install_env", '["X=9.9", "Y=true"]'],
        ["--env.install_env", '{"X": "9.9", "Y": "true"}'],
    ],
)
def test_the_values_of_a_mapping_of_texts_are_texts(words: list[str]) -> None:
    line = CommandLine("run", SweSmithOracleEnvConfig, APIServerConfig, command="process")
    parsed = line.parse(words)
    assert isinstance(parsed, Parsed)
    assert parsed.env_config.install_env == {"X": "9.9", "Y": "true"}


def test_none_and_enums() -> None:
    run = parse("process", "--env.system_prompt", "None", "--env.eval_handling", "limit_train")
    assert run.env_config.system_prompt is None
    assert run.env_config.eval_handling is EvalHandlingEnum.LIMIT_TRAIN


def test_a_value_may_begin_with_a_dash() -> None:
    assert parse("process", "--env.system_prompt", "- be terse").env_config.system_prompt == "- be terse"
    assert parse("process", "--env.system_prompt=--be terse").env_config.system_prompt == "--be terse"


@given(st.text(min_size=1))
def test_any_text_survives_the_equals_form(text: str) -> None:
    expected = None if text.lower() in ("none", "null") else text
    assert parse("process", f"--env.system_prompt={text}").env_config.system_prompt == expected


def test_short_forms() -> None:
    words = "--model m --base-url http://127.0.0.1:1/v1 --tasks 3 --group 2 --concurrency 7 --backend local"
    run = parse("evaluate", *words.split())
    config, server = run.env_config, run.server_configs[0]
    assert (config.total_steps, config.group_size, config.max_num_workers) == (3, 2, 7)
    assert (server.model_name, server.base_url) == ("m", "http://127.0.0.1:1/v1")


def test_precedence_is_default_config_init_file_environment_flag(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("env: {max_agent_turns: 6, group_size: 6, seed: 6, total_steps: 6}\n")
    run = parse("process", "--config", str(file), "--group", "8", PALAESTRA_ENV_SEED="7", PALAESTRA_ENV_GROUP_SIZE="7")
    config = run.env_config
    assert (config.max_agent_turns, config.total_steps, config.seed, config.group_size) == (6, 6, 7, 8)
    assert run.sources["env.seed"] == "environment"
    assert run.sources["env.group_size"] == "command line"
    assert run.sources["env.total_steps"] == str(file)
    assert run.sources["env.worker_timeout"] == "default"
    assert parse("process").sources["env.max_agent_turns"] == "config_init"


def test_a_file_gives_settings_by_their_own_names(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("tasks: 3\ngroup: 6\nout: groups.jsonl\nbackend: local\nenv: {max_num_workers: 7}\n")
    run = parse("process", "--config", str(file), "--group", "8")
    config = run.env_config
    assert (config.total_steps, config.group_size, config.max_num_workers, config.tool_pool_mode) == (3, 8, 7, "local")
    assert config.data_path_to_save_groups == "groups.jsonl"
    assert run.sources["env.total_steps"] == str(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tasks: 3\nenv: {total_steps: 3}\n", "tasks and env.total_steps are the same setting; give only one of them"),
        ("tasks: many\n", "tasks 'many': input should be a valid integer"),
        ("task: 3\n", "unknown key task; .* Did you mean tasks?"),
    ],
)
def test_a_wrong_own_name_in_a_file(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        parse("process", "--config", str(file))


def test_process_keeps_messages_and_equal_scores() -> None:
    process, evaluate = parse("process").env_config, parse("evaluate").env_config
    assert (process.include_messages, process.ensure_scores_are_not_same) == (True, False)
    assert (evaluate.include_messages, evaluate.ensure_scores_are_not_same) == (False, False)
    assert parse("serve", "--group", "2").env_config.ensure_scores_are_not_same


def test_a_file_with_several_servers(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text("openai:\n- base_url: http://a/v1\n- {base_url: http://b/v1, model_name: big}\ntesting: true\n")
    run = parse("process", "--config", str(file), "--openai.timeout", "9")
    assert [(s.base_url, s.model_name, s.timeout) for s in run.server_configs] == [
        ("http://a/v1", "own", 9),
        ("http://b/v1", "big", 9),
    ]
    assert run.sources["openai[1].model_name"] == str(file)
    assert run.testing is True


def test_an_address_or_policy_above_the_file_leaves_one_server(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text("openai: [{base_url: http://a/v1}, {base_url: http://b/v1}]")
    one = parse("process", "--config", str(file), "--base-url", "http://c/v1")
    assert [s.base_url for s in one.server_configs] == ["http://c/v1"]
    scripted = parse("process", "--config", str(file), "--policy", "noop")
    assert [s.server_type for s in scripted.server_configs] == ["scripted"]


def test_environment_variables_name_the_server() -> None:
    server = parse("process", PALAESTRA_OPENAI_API_KEY="k", ATROPOS_SERVER_MODEL="m").server_configs[0]
    assert (server.api_key, server.model_name) == ("k", "m")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["process", "--env.grup_size", "3"], "unknown flag --env.grup_size. Did you mean --env.group_size?"),
        (["process", "--polcy", "oracle"], "unknown flag --polcy. Did you mean --policy?"),
        (["process", "--env.max_item=3"], "Did you mean --env.max_items?"),
        (["proces"], "unknown command 'proces'; use process, evaluate or serve. Did you mean process?"),
        ([], "no command was given; use process, evaluate or serve."),
        (["process", "stray"], "unexpected word 'stray'"),
        (["process", "--group", "2", "3"], "--group: takes one value, got 2: 2 3"),
        (["process", "--group"], "--group: needs a value (int)"),
        (["process", "--group", "many"], "--group 'many'"),
        (["process", "--env.python_only", "maybe"], "neither true nor false"),
        (["process", "--env.group_size.x", "1"], "env.group_size is not a mapping"),
        (["process", "--policy", "oracle", "--model", "m"], "--policy and --model are mutually exclusive"),
        (["process", "--config", "/nowhere.yaml"], "cannot read the configuration file /nowhere.yaml"),
        (["process", "--config"], "--config: needs a value"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_way_out(argv: list[str], message: str) -> None:
    assert message in refusal(*argv)


def test_a_misspelt_environment_variable_is_refused() -> None:
    said = refusal("process", PALAESTRA_OPENAI_API_KY="k")
    check_message(said, "environment", "PALAESTRA_OPENAI_API_KY", "PALAESTRA_OPENAI_API_KEY")


def test_an_unknown_parser_of_a_script_is_replaced_and_one_of_a_user_refused() -> None:
    line = CommandLine("x", HermesAgentEnvConfig, APIServerConfig, env_values={"tool_call_parser": "hermess"})
    found = line.parse(["process"], {})
    assert isinstance(found, Parsed)
    assert found.env_config.tool_call_parser == "hermes"
    assert any("'hermess' (config_init) is not" in n for n in found.notices)
    for flag in ("--env.tool_call_parser", "--openai.tool_parser"):
        with raises(ConfigError, "qwen3_coder"):
            line.parse(["process", flag, "qwen3_codr"], {})


def test_a_default_command_makes_the_command_optional() -> None:
    line = CommandLine("palaestra run toy.py", ToyConfig, APIServerConfig, command="process")
    assert parse("--group", "2", line=line).command == "process"
    assert parse("evaluate", line=line).command == "evaluate"


def test_show_config_says_where_each_value_came_from_and_hides_the_key() -> None:
    lines = answer("process", "--show-config", "--group", "2", PALAESTRA_OPENAI_API_KEY="sk-1").splitlines()
    shown = {line.split(" = ")[0]: line for line in lines}
    assert shown["group"].split() == ["group", "=", "2", "#", "command", "line", "(env.group_size)"]
    assert [*shown][:5] == ["group", "tasks", "concurrency", "out", "backend"]  # own names come first
    assert shown["env.max_agent_turns"].endswith("# config_init")
    assert shown["openai.api_key"].split(" = ")[1].split() == ["(hidden)", "#", "environment"]
    assert "sk-1" not in "".join(lines)


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["process", "--help"], ["bogus", "--help"]])
def test_help_fits_a_screen_and_teaches(argv: list[str]) -> None:
    text = answer(*argv)
    assert len(text.splitlines()) <= 40
    assert text.count("toy_env.py process --") == 3
    assert "--env.max_items int" in text
    check_message(text, "Rows", "used")
    assert "[own]" in text


def test_help_offers_the_server_types_that_there_are() -> None:
    (offered,) = re.findall(r"--openai.server_type (\S+)", answer("--help-all"))
    assert set(offered.split("|")) == set(ENGINES)


def test_the_settings_of_the_environment_and_the_server_are_in_the_long_help() -> None:
    text = answer("--help-all")
    for name in ("max_items", "python_only"):
        assert f"--env.{name}" in text
    for name in APIServerConfig.model_fields:
        assert f"--openai.{name}" in text
