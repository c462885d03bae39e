"""A trained model of 135M weights in this process: `doctor`, rollouts, a chat that is compacted, and an editor. What is
recorded is compared with transformers row by row. `make real-model` runs these tests, and gets the model."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from chat.chat_process import environment
from palaestra_tokens.config import APIServerConfig
from real_models.doors import (
    FILES_ENV,
    MODEL,
    ONE_CALL,
    chat_rows,
    check_rows,
    exported_rows,
    palaestra,
    talk_until_compacted,
    varied_model,
)

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None or not MODEL.is_dir(),
        reason="needs torch and smollm2: make real-model",
    ),
]

WINDOW = 512
SENTENCES = "The ship left the harbour at dawn, and nobody on the pier knew when it would come back. " * 2
IN_PROCESS = ("--openai.server_type", "transformers", "--model", "smollm2")


def test_doctor_finds_nothing_wrong(tmp_path: Path) -> None:
    checks = json.loads(palaestra(tmp_path, "doctor", "smollm2", "--json"))["checks"]
    # The tokenizer is the model's own, so there is none to compare with.
    assert [check["name"] for check in checks if check["state"] != "ok"] == ["tokenizer agrees"], checks


@pytest.mark.slots
def test_rollouts_record_the_models_own_log_probabilities(tmp_path: Path) -> None:
    palaestra(tmp_path, "run", FILES_ENV, *IN_PROCESS, "--tasks", "2", "--group", "4", *ONE_CALL)
    assert "T1 to T4 hold" in palaestra(tmp_path, "verify", "last")
    rows = exported_rows(tmp_path, "last")
    assert len(rows) == 8
    assert len({tuple(row["completion_ids"]) for row in rows}) == 8
    check_rows(rows)


def test_a_chat_of_ten_turns_is_compacted_and_its_tokens_stay_exact(tmp_path: Path) -> None:
    model = varied_model(tmp_path / "model", config={"max_position_embeddings": WINDOW})
    talk_until_compacted(
        tmp_path, APIServerConfig(server_type="transformers", model_name=str(model)), SENTENCES, WINDOW
    )
    rows = chat_rows(tmp_path)
    assert len(rows) > 1
    check_rows(rows)


class Editor:
    """A client that keeps what it is told."""

    def __init__(self) -> None:
        self.updates: list[Any] = []

    def on_connect(self, conn: object) -> None: ...

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        self.updates.append(update)

    def text(self) -> str:
        return "".join(each.content.text for each in self.updates if each.session_update == "agent_message_chunk")


@pytest.mark.slots
def test_an_editor_gets_an_answer_and_stops_another(tmp_path: Path) -> None:
    import acp

    async def session() -> None:
        editor = Editor()
        words = ("acp", *IN_PROCESS, "--toolsets", "--env.max_token_length", "200")
        async with acp.spawn_agent_process(
            editor, "palaestra", *words, env=environment(tmp_path), use_unstable_protocol=True
        ) as (agent, _):
            await agent.initialize(protocol_version=acp.PROTOCOL_VERSION)
            opened = (await agent.new_session(cwd=str(tmp_path), mcp_servers=[])).session_id
            first = await agent.prompt(session_id=opened, prompt=[acp.text_block("What is the capital of France?")])
            assert first.stop_reason in ("end_turn", "max_tokens")
            assert editor.text()

            editor.updates.clear()
            story = [acp.text_block("Tell me a very long story about a ship.")]
            asked = asyncio.create_task(agent.prompt(session_id=opened, prompt=story))
            await asyncio.sleep(2)  # this engine shows a reply only when it is whole, which takes about 12 s here
            await agent.cancel(session_id=opened)
            assert (await asked).stop_reason == "cancelled"

    asyncio.run(session())
    check_rows(chat_rows(tmp_path))
