"""Model servers for tests of integrations: one that solves `fix_calc`, one that does nothing, and one that fails; and
the folder of `Fixer`'s tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from bug_fixing import FIX, TOKENIZER

from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

CALL = {"id": "c1", "type": "function", "function": {"name": "terminal", "arguments": f'{{"command": "{FIX}"}}'}}


def solving() -> LoopbackServer:
    return LoopbackServer(_answer(None, "tool_calls", tool_calls=[CALL]), _answer("Done"))


def idle() -> LoopbackServer:
    return LoopbackServer(_answer("I did nothing."))


def _answer(*said: object, **more: object) -> FakeAnswer:
    """A reply with the field `created`, which strict proxies need."""
    return FakeAnswer({**completion(*said, **more), "created": 1})


def refusing() -> LoopbackServer:
    return LoopbackServer(FakeAnswer({"error": {"message": "wrong key"}}, status=401))


def toy_folder(tmp_path: Path) -> Path:
    """A model's folder with the tokenizer only."""
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    TOKENIZER.save(folder / "tokenizer.json")
    config = {"eos_token": "<|im_end|>", "chat_template": TOKENIZER.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
