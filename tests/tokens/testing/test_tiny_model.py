"""The tiny model's tokenizer and template, and, where torch is there, the model itself."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.cli.main import main
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.server_checks import CheckState, writing_checks
from palaestra_tokens.templates import ChatTemplate
from palaestra_tokens.testing.tiny_model import SPECIAL, TAGS, chat_template, make_tiny, save_tokenizer, train_tokenizer
from palaestra_tokens.tokenizers import load_tokenizer

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="needs the extra 'train': make test-torch")

TOKENIZER = train_tokenizer()
TOOL: dict[str, JSON] = {
    "type": "function",
    "function": {"name": "terminal", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}
CALL: dict[str, JSON] = {"id": "call00001", "function": {"name": "terminal", "arguments": {"command": "ls"}}}
CONVERSATION: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which files?"},
    {"role": "assistant", "content": "", "reasoning_content": "Look first.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": "a.txt"},
    {"role": "assistant", "content": "One: a.txt"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(TOKENIZER, out)
    return out


def test_the_tokenizer_is_the_same_each_time() -> None:
    assert train_tokenizer().to_str() == TOKENIZER.to_str()


def test_marks_are_one_token_each(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    for mark in (*SPECIAL, *TAGS):
        assert len(tokenizer.encode(mark)) == 1
    assert tokenizer.decode(list(tokenizer.special_ids)[:1], skip_special_tokens=True) == ""
    assert tokenizer.decode([tokenizer.stop_ids[0]]) == "<|im_end|>"


@given(text=st.text())
def test_any_text_comes_back_as_it_was(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_the_template_writes_a_conversation_so() -> None:
    text = ChatTemplate(chat_template()).render(CONVERSATION, tools=[TOOL])
    system, *rest = text.split("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nBe brief.\n\nYou may call")
    assert json.dumps(TOOL) in system
    assert rest == [
        "<|im_start|>user\nWhich files?",
        "<|im_start|>assistant\n<think>\nLook first.\n</think>\n\n"
        '<tool_call>\n{"name": "terminal", "arguments": {"command": "ls"}}\n</tool_call>',
        "<|im_start|>tool\n<tool_response>\na.txt\n</tool_response>",
        "<|im_start|>assistant\nOne: a.txt",
        "<|im_start|>assistant\n",
    ]


def test_the_template_without_system_and_without_tools() -> None:
    template = ChatTemplate(chat_template())
    hello: Message = {"role": "user", "content": "Hello"}
    assert template.render([hello], add_generation_prompt=False) == "<|im_start|>user\nHello<|im_end|>\n"
    assert template.render([CONVERSATION[0], hello]).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def test_every_step_of_a_conversation_begins_with_the_one_before() -> None:
    template = ChatTemplate(chat_template())
    before = ""
    for end in range(2, len(CONVERSATION) + 1):
        text = template.render(CONVERSATION[:end], tools=[TOOL], add_generation_prompt=False)
        assert text.startswith(before)
        before = text


def test_the_examination_finds_nothing_wrong_with_it(folder: Path) -> None:
    checks = list(writing_checks(load_tokenizer(str(folder)), None, "hermes"))
    assert [check.state for check in checks] == [CheckState.OK] * 3


@pytest.mark.skipif(HAS_TORCH, reason="only where torch is missing")
def test_without_torch_the_error_names_the_extra(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pip install .*\[train\]"):
        make_tiny(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.torch
@needs_torch
class TestTheModel:
    def test_it_learns_only_short_replies(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="72 tokens or more"):
            make_tiny(tmp_path / "model", replies=["yes", "1 2 3 4 " * 20])

    def test_it_is_the_same_for_the_same_seed(self, tmp_path: Path) -> None:
        one, two, other = (
            make_tiny(tmp_path / name, seed=seed, hidden=64, layers=1).path
            for name, seed in (("one", 1), ("two", 1), ("other", 2))
        )
        weights = [(path / "model.safetensors").read_bytes() for path in (one, two, other)]
        assert weights[0] == weights[1] != weights[2]
        assert {path.name for path in one.iterdir()} == {
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        }

    def test_transformers_renders_its_template_as_we_do(self, tmp_path: Path) -> None:
        from transformers import AutoTokenizer

        path = make_tiny(tmp_path, hidden=64, layers=1).path
        theirs = AutoTokenizer.from_pretrained(path)
        text = theirs.apply_chat_template(CONVERSATION, tools=[TOOL], tokenize=False, add_generation_prompt=True)
        assert text == ChatTemplate(chat_template()).render(CONVERSATION, tools=[TOOL])
        assert theirs.encode(text) == load_tokenizer(str(path)).encode(text)
        marked = theirs.apply_chat_template(
            CONVERSATION, tools=[TOOL], return_dict=True, return_assistant_tokens_mask=True
        )
        trained = [token for token, mask in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if mask]
        assert theirs.decode(trained).endswith("</tool_call><|im_end|>One: a.txt<|im_end|>")

    def test_practice_makes_calls_likelier(self, tmp_path: Path) -> None:
        made = make_tiny(tmp_path, practice=12)
        assert made.practice_loss is not None
        assert made.practice_loss < 5.0, "log(1033) is 6.9"

    def test_it_leaves_torchs_random_state_alone(self, tmp_path: Path) -> None:
        import torch

        before = torch.get_rng_state()
        make_tiny(tmp_path, hidden=32, layers=1)
        assert torch.equal(before, torch.get_rng_state())

    def test_the_command(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        argv = ["model", "tiny", str(tmp_path / "out"), "--hidden", "64", "--layers", "1", "--json"]
        assert main(argv) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["path"] == str(tmp_path / "out")
        assert facts["vocabulary"] == 1033
        assert main(argv) == 2
        assert "is not empty" in capsys.readouterr().err
        assert main([*argv, "--force"]) == 0

    @pytest.mark.parametrize(("hidden", "layers"), [(48, 1), (0, 1), (64, 0)])
    def test_sizes_that_cannot_work(self, tmp_path: Path, hidden: int, layers: int) -> None:
        with pytest.raises(ConfigError, match="multiple of 32"):
            make_tiny(tmp_path, hidden=hidden, layers=layers)
