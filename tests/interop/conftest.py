"""The tests that run the original runtime, atroposlib, beside ours: `make interop`."""

from __future__ import annotations

from pathlib import Path

import pytest

from interop.peer import THEIRS
from palaestra_tokens.testing.tiny_model import save_tokenizer, train_tokenizer
from palaestra_tokens.tokenizers import Tokenizer, load_tokenizer

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder, and skip them where the runtime is not installed."""
    missing = pytest.mark.skip(reason="needs .venv-interop: run `make interop`")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.interop)
            if "test_official" in item.path.name:  # they run in an environment of their own
                continue
            item.add_marker(pytest.mark.timeout(400))
            if not THEIRS.exists():
                item.add_marker(missing)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with its chat template, as a model's folder has them."""
    out = tmp_path_factory.mktemp("model")
    save_tokenizer(train_tokenizer(), out)
    return out


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder))
