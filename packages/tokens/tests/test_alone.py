"""The package without `palaestra` and without sandboxes, and the example of its README."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import palaestra_tokens
from palaestra_tokens.serving.token_server import TokenLoopback
from palaestra_tokens.testing.fake_engine import ToyEngine, toy_tokenizer
from palaestra_tokens.testing.tiny_model import save_tokenizer

PACKAGE = Path(__file__).parents[1]


def python(*arguments: str) -> str:
    environ = {**os.environ, "PYTHONPATH": f"{PACKAGE / 'src'}{os.pathsep}{PACKAGE.parent / 'slots/src'}"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environ, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_public_name_resolves() -> None:
    assert [name for name in palaestra_tokens.__all__ if getattr(palaestra_tokens, name, None) is None] == []


def test_it_loads_no_sandbox_and_nothing_of_the_runtime() -> None:
    wanted = ("palaestra_slots.sandbox", "palaestra_slots.processes", "palaestra_slots.images", "palaestra.")
    script = "import sys, palaestra_tokens\nfor name in palaestra_tokens.__all__: getattr(palaestra_tokens, name)\n"
    loaded = python("-c", f"{script}print([m for m in sys.modules if f'{{m}}.'.startswith({wanted})])")
    assert loaded.strip() == "[]"


def test_parsing_needs_no_http_client() -> None:
    script = (
        "import sys; from palaestra_tokens import get_parser; get_parser('hermes'); print('aiohttp' in sys.modules)"
    )
    assert python("-c", script).strip() == "False"


async def test_the_readmes_example_prints_rows_and_their_proof(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer(["Hello there"] * 3)
    (tmp_path / "model").mkdir()
    save_tokenizer(tokenizer, tmp_path / "model")
    found = re.search(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)
    assert found is not None
    async with TokenLoopback(ToyEngine(tokenizer, iter(["Hello there"])), tokenizer) as server:
        example = found[1].replace("http://127.0.0.1:8000", server.url).replace("FOLDER", str(tmp_path / "model"))
        result = await asyncio.to_thread(python, "-c", example)
    text, row, proof = result.splitlines()
    assert (text, proof) == ("Hello there", "True")
    assert "-100" in row


@pytest.mark.parametrize("name", ["palaestra", "palaestra_tokens.nothing"])
def test_an_unknown_name_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match="no attribute"):
        getattr(palaestra_tokens, name)
