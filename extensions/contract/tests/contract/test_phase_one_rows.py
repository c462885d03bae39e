"""Rows of servers that return no tokens: those of the conversation, if the class has a tokenizer; never trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from palaestra_contract import AgentEnv, AgentEnvConfig, HermesAgentBaseEnv
from palaestra_contract.chat_tokenizer import chat_tokenizer
from palaestra_slots.core.types import JSON
from palaestra_tokens import APIServerConfig
from palaestra_tokens.testing.tiny_model import save_tokenizer, train_tokenizer
from palaestra_tokens.tokenizers import load_tokenizer

pytestmark = pytest.mark.slots


class Words(HermesAgentBaseEnv):
    async def setup(self) -> None: ...

    async def get_next_item(self) -> JSON:
        return {"id": "a", "solution": "echo done"}

    def format_prompt(self, item: JSON) -> str:
        return "Say done"

    async def compute_reward(self, item: JSON, result: JSON, ctx: JSON) -> float:
        return 1.0

    async def evaluate(self, *args: JSON, **kwargs: JSON) -> JSON: ...


class Changed(Words):
    def _build_scored_item(self, item: JSON, result: JSON, reward: float) -> Any:
        row = super()._build_scored_item(item, result, reward)
        row["masks"] = row["tokens"]
        return row


class Assigned(Words):
    """Has a tokenizer of its own."""

    async def setup(self) -> None:
        self.tokenizer = self.config.system_prompt and chat_tokenizer(load_tokenizer(self.config.system_prompt))


class Text(AgentEnv[AgentEnvConfig]):
    async def setup_agent_env(self) -> None: ...

    async def get_next_item(self) -> JSON:
        return {"id": "a", "solution": "echo done"}

    def build_task(self, item: JSON) -> str:
        return "Say done"

    async def score_trajectory(self, item: JSON, final_response: str) -> float:
        return 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(), folder)
    return str(folder)


CASES: list[tuple[type[HermesAgentBaseEnv], str, bool, str]] = [
    (Words, "FOLDER", True, "placeholder"),
    (Text, "FOLDER", True, "placeholder"),
    (Assigned, "none", True, "placeholder"),
    (Words, "none", False, "placeholder"),
    (Words, "/nowhere/at/all", False, "placeholder"),
    (Changed, "FOLDER", True, "environment"),
]


@pytest.mark.parametrize(("cls", "name", "tokenised", "source"), CASES)
async def test_a_row_has_the_tokens_of_its_conversation(
    cls: type[HermesAgentBaseEnv], name: str, tokenised: bool, source: str, folder: str, tmp_path: Path
) -> None:
    prompt = folder if cls is Assigned else None
    settings = {"tokenizer_name": name.replace("FOLDER", folder), "system_prompt": prompt}
    config = cls.env_config_cls.model_validate({"enabled_toolsets": ["terminal"], **settings})
    env = cls(config, [APIServerConfig(server_type="scripted", model_name="oracle")])
    await env.setup()
    row = (await env.collect_trajectory(await env.get_next_item()))[0]
    text = "\n".join(message["content"] for message in row["messages"] if message.get("content"))
    tokens = load_tokenizer(folder).encode(text)
    assert (list(row["tokens"]) == list(tokens)) is tokenised
    assert row["token_source"] == source
    assert (set(row["masks"]) == {-100}) is (source == "placeholder")
