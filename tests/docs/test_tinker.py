"""The first program of docs/tinker.md runs, with the real SDK; the integrations' tests run the one of the cookbook."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from palaestra_slots.core.io.threads import LoopThread
from palaestra_tokens.testing.tiny_model import make_tiny

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
pytest.importorskip("tinker")

PAGE = Path(__file__).parents[2] / "docs" / "tinker.md"


def test_the_program_trains_and_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from palaestra_train.tinker.server import serving
    from palaestra_train.tinker.service import ServiceSettings

    program, _ = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    make_tiny(tmp_path / "tiny", hidden=64, layers=2)
    loop = LoopThread("tinker-server")
    server = serving(str(tmp_path / "tiny"), tmp_path / "checkpoints", settings=ServiceSettings(device="cpu"))
    started = loop.wait(server.__aenter__())
    try:
        for words, own in (("http://127.0.0.1:8010", started.url), ("/tmp/tiny/", started.name)):
            assert words in program
            program = program.replace(words, own)
        exec(compile(program, "docs/tinker.md", "exec"), {})
    finally:
        loop.wait(server.__aexit__(None, None, None))
        loop.close()
    printed = capsys.readouterr().out
    assert "loss:sum" in printed
    assert "/weights/first" in printed
