"""Configuration files and environment variables as layers."""

from pathlib import Path

import pytest

from palaestra.envs.config.layers import read_environ, read_file
from palaestra_slots.core.errors import ConfigError
from palaestra_tokens.config import APIServerConfig


def written(folder: Path, text: str) -> Path:
    path = folder / "conf.yaml"
    path.write_text(text)
    return path


def test_a_file_gives_a_layer_per_part(tmp_path: Path) -> None:
    path = written(tmp_path, "env: {group_size: 2}\nopenai: {model_name: m}\nslurm: false\n")
    file = read_file(path)
    assert file.env.values == {"group_size": 2}
    assert file.env.name == str(path)
    assert [layer.values for layer in file.servers] == [{"model_name": "m"}]
    assert file.shared
    assert file.switches == {"slurm": False}


@pytest.mark.parametrize("text", ["", "env:\n", "# only a comment\n"])
def test_an_empty_file_sets_nothing(tmp_path: Path, text: str) -> None:
    assert read_file(written(tmp_path, text)).env.values == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("evn: {}", r"unknown key evn; .*Did you mean env\?"),
        ("- a", "expected a mapping"),
        ("env: [a]", "env must be a mapping, not list"),
        ("openai: [a]", "openai must be a mapping, not str"),
        ("env: {a: [}", "is not YAML"),
        ("env: {a: !!bool maybe}", "is not YAML: KeyError: 'maybe'"),
        ("testing: maybe", "testing must be true or false"),
        ("env: {extra_body.x: 1}", "is not a setting"),
        ("env: {1: 2}", "is not a setting"),
        ("env: {seed: 1}\nopenai: {}\nenv: {}", "line 3: env is a duplicate key"),
        ("openai:\n- api_key: a\n  api_key: b", "line 3: api_key is a duplicate key"),
    ],
)
def test_a_bad_file_is_named_with_its_fault(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_file(written(tmp_path, text))
    assert "conf.yaml" in str(caught.value)


def test_files_hold_data_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not YAML"):
        read_file(written(tmp_path, "env: {seed: !!python/object/apply:os.getpid []}"))


def test_our_variable_wins_over_the_contracts() -> None:
    layer = read_environ(
        {"PALAESTRA_OPENAI_MODEL_NAME": "ours", "ATROPOS_SERVER_MODEL": "theirs"}, "openai", APIServerConfig
    )
    assert layer.values == {"model_name": "ours"}
    assert layer.spelled == {"model_name": "PALAESTRA_OPENAI_MODEL_NAME"}


def test_other_variables_and_empty_ones_are_left_alone() -> None:
    assert read_environ({"HOME": "/x", "ATROPOS_SERVER_API_KEY": ""}, "openai", APIServerConfig).values == {}
