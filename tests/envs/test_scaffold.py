"""`palaestra env new` writes what runs as it is; `palaestra env show` says what there is."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import pytest

from palaestra.cli.main import main
from palaestra.envs.scaffold import TEMPLATES, write_environment
from palaestra_slots.core.errors import ConfigError


def said(*argv: str) -> int:
    return main(list(argv))


@pytest.mark.slots
@pytest.mark.parametrize("form", [[], ["--class"]], ids=["function", "class"])
def test_a_new_environment_proves_itself(
    form: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said("env", "new", "my_words", *form) == 0
    assert capsys.readouterr().out == "my_words_env.py\n"
    assert "palaestra." not in "".join(re.findall("^(?:from|import) .*", Path("my_words_env.py").read_text(), re.M))
    assert said("env", "check", "--only", "stale-reward", "--json", "my_words_env.py") == 0
    proof = json.loads(capsys.readouterr().out)
    assert proof["proven"]
    assert {line["policy"]: line["rewards"][0] for line in proof["lines"]} == {
        "oracle": 1.0, "noop": 0.0, "stale-reward": 0.0,
    }  # fmt: skip
    assert proof["ways"] == {"outside": "" if form else "scale:scale"}


@pytest.mark.slots
def test_a_new_conversation_passes_its_whole_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said("env", "new", "my_desk", "--template", "conversation") == 0
    assert said("env", "check", "my_desk_env.py", "--tasks", "3", "--json") == 0
    proof = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert proof["proven"]
    assert proof["holds"]
    assert not proof["not_tested"]
    assert not proof["warnings"]
    played = {line["policy"]: line["rewards"] for line in proof["lines"] if line["rewards"]}
    assert played["oracle"] == [1.0, 1.0, 1.0]
    assert {"noop", "words-only", "calls-only", "without-call", "other-solution", "every-number"} <= played.keys()


def test_it_lies_among_the_others_and_takes_nobodys_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("environments").mkdir()
    assert said("env", "new", "words") == 0
    assert said("env", "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out.partition("\n")[2])[0]
    assert (listed["name"], listed["summary"][:6]) == ("words", "Words:")
    assert said("env", "new", "words_env.py") == 2
    assert "environments/words_env.py already exists" in capsys.readouterr().err
    assert said("env", "new", "My-Words") == 2


def test_a_word_of_pythons_names_no_environment(tmp_path: Path) -> None:
    for template, name in product(TEMPLATES, ("class", "range", "sorted")):
        with pytest.raises(ConfigError, match=f"'{name}' cannot name an environment"):
            write_environment(name, tmp_path, template)
    assert not list(tmp_path.iterdir())


def test_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert said("env", "new", "words", "--class") == 0
    capsys.readouterr()
    assert said("env", "show", "words_env.py", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["name"], shown["form"]) == ("words", "WordsEnv")
    assert {setting["name"]: setting["value"] for setting in shown["settings"]} == {
        "group_size": 2,
        "total_steps": 10,
        "enabled_toolsets": ["terminal"],
    }
    assert said("env", "show", "nothing.py") == 2


@pytest.mark.parametrize(("name", "template"), [("right", "function"), ("book", "conversation")])
def test_a_function_of_the_template_names_no_environment(name: str, template: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another name"):
        write_environment(name, tmp_path, template)
    assert not list(tmp_path.iterdir())
