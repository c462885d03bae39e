"""Tokenizers from folders and files: what is read beside them, and every way in which there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden_messages import check_message, raises
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_tokens.testing.fake_engine import toy_tokenizer
from palaestra_tokens.tokenizers import load_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    toy_tokenizer(["hello there"]).save(tmp_path / "tokenizer.json")
    return tmp_path


def write(folder: Path, name: str, value: JSON) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def test_text_survives_byte_for_byte(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    for text in ("hello", " two  spaces ", "naïve 東京 🙂\r\n\t\0", "<|im_end|>x<|im_start|>", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_end|>") == [tokenizer.token_to_id("<|im_end|>")]
    assert tokenizer.special_ids >= {tokenizer.token_to_id("<|im_end|>")}
    assert len(tokenizer) > max(tokenizer.encode("hello there<|im_end|>"))


def test_what_lies_beside_it_is_read(folder: Path) -> None:
    eos, start = {"content": "<|im_end|>", "lstrip": False}, "<|im_start|>"
    write(folder, "tokenizer_config.json", {"eos_token": eos, "bos_token": start, "chat_template": "from the config"})
    write(folder, "generation_config.json", {"eos_token_id": [5, 6]})
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.special == {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    assert tokenizer.stop_ids == (5, 6, tokenizer.token_to_id("<|im_end|>"))
    assert tokenizer.chat_template == "from the config"
    write(folder, "chat_template.jinja", "from a file of its own")
    check_message(load_tokenizer(str(folder / "tokenizer.json")).chat_template)


@pytest.mark.parametrize(
    ("found", "template"),
    [
        ([{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}], "t"),
        ([{"name": "default", "template": "d"}], "d"),
        (None, None),
    ],
)
def test_named_templates(folder: Path, found: JSON, template: str | None) -> None:
    write(folder, "tokenizer_config.json", {"chat_template": found})
    assert load_tokenizer(str(folder)).chat_template == template


def test_truncation_and_padding_of_the_file_are_switched_off(folder: Path) -> None:
    value = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    value["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    write(folder, "tokenizer.json", value)
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.decode(tokenizer.encode("hello there, all of you")) == "hello there, all of you"


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["/no/such/model", "./no-such-model", "~/no-such-model"])
def test_a_path_is_not_looked_for_elsewhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with raises(ConfigError):
        load_tokenizer(name)


def test_a_mistyped_folder_is_not_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with raises(ConfigError):
        load_tokenizer("models/tiny")


def test_a_home_directory_that_is_not_there_is_one_error() -> None:
    with raises(ConfigError, "~nobody-of-this-name/m", "HOME"):
        load_tokenizer("~nobody-of-this-name/m")


def test_a_hub_that_cannot_be_reached_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="LocalEntryNotFoundError"):
        load_tokenizer("nobody/has-this-model")


@pytest.mark.parametrize("name", ["", "none", "default"])
def test_no_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"set --openai\.tokenizer_name"):
        load_tokenizer(name)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(folder: Path, file: str) -> None:
    write(folder, file, "{")
    with pytest.raises(ConfigError, match=file):
        load_tokenizer(str(folder))


def test_text_that_is_half_a_letter_is_still_encoded() -> None:
    tokenizer = toy_tokenizer()
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"
