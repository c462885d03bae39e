"""The plots and the diagram of the documentation: drawn from measurements, readable on a phone, never stale."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from palaestra_toolsets.browser import chromium

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs/pictures"
DRAWN = ("slots.svg", "tokens.svg", "learning.svg", "chat_turns.svg", "floor.svg", "spine.svg", "waterfall.svg")

PHONE, LEAST = 368, 11
"""The width of the text column on a phone of 400 pixels, and the least size of text there."""

MEASURE = """texts => texts.map(text => {
  const { left, right, top, bottom, height } = text.getBoundingClientRect();
  const size = parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a;
  return { words: text.textContent, left, right, top, bottom, size };
})"""


@pytest.fixture(scope="module")
def plots() -> Iterator[ModuleType]:
    """`scripts/plots.py`, which imports its neighbour."""
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("plots")
    sys.path.remove(str(ROOT / "scripts"))


def test_the_plots_show_what_is_in_their_data_files(plots: ModuleType) -> None:
    assert set(plots.PLOTS) == {*DRAWN} - {"spine.svg"}
    for name, plot in plots.PLOTS.items():
        assert plot.svg(PICTURES / "data") == (PICTURES / name).read_text(), f"{name}: run make pictures"
        data = json.loads((PICTURES / "data" / plot.data).read_text())
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", data["date"])
        assert re.search(r"cores, load [\d.]+( to [\d.]+)?$", data["machine"])
        script = re.match(rf"python (benchmarks/\w+\.py) .*--json docs/pictures/data/{plot.data}$", data["command"])
        assert script is not None
        assert (ROOT / script[1]).exists()


def test_a_value_changes_its_plot(plots: ModuleType) -> None:
    data = json.loads((PICTURES / "data/slots.json").read_text())
    before = plots.slots(data)
    for row in data["rows"]:
        row["value"] *= 1.5 if row["name"] == "docker exec" else 1
    after = plots.slots(data)
    assert after != before
    assert re.findall(r"docker exec \d+ ms", after) != re.findall(r"docker exec \d+ ms", before)


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_has_text_for_those_who_do_not_see_it(name: str) -> None:
    text = (PICTURES / name).read_text()
    assert re.search(r"<title[^>]*>.{5,}</title>", text)
    assert re.search(r"<desc[^>]*>.{40,}</desc>", text)
    assert "prefers-color-scheme: dark" in text


@pytest.mark.slow
def test_text_is_readable_on_a_phone() -> None:
    if (reason := chromium.problem()) is not None:
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    wrong = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium.usable(), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 400, "height": 800})
        for name in DRAWN:
            svg = re.sub(r'width="480" height="\d+"', f'width="{PHONE}"', (PICTURES / name).read_text(), count=1)
            page.set_content(f'<body style="margin: 0">{svg}</body>')
            texts = page.eval_on_selector_all("svg text", MEASURE)
            assert texts
            for number, text in enumerate(texts):
                if text["size"] < LEAST:
                    wrong.append(f"{name}: {text['words']!r} has {text['size']:.1f} pixels")
                if text["left"] < 0 or text["right"] > PHONE:
                    wrong.append(f"{name}: {text['words']!r} is cut off")
                wrong += [
                    f"{name}: {text['words']!r} is over {other['words']!r}"
                    for other in texts[number + 1 :]
                    if min(text["right"], other["right"]) - max(text["left"], other["left"]) > 1
                    and min(text["bottom"], other["bottom"]) - max(text["top"], other["top"]) > 3
                ]
        browser.close()
    assert wrong == []


@pytest.mark.slow
def test_the_check_finds_a_plot_that_is_older_than_its_data(tmp_path: Path) -> None:
    needed = [
        "scripts", "docs/pictures", "README.md", "packages/palaestra/src/palaestra/rollouts/observe/console.py",
        "extensions/chat/src/palaestra_chat/terminal", "extensions/view/src/palaestra_view/page",
    ]  # fmt: skip
    for path in needed:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
        copy(ROOT / path, tmp_path / path)

    def check() -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, str(tmp_path / "scripts/pictures.py"), "--check"]
        return subprocess.run(argv, capture_output=True, text=True)

    assert check().returncode == 0, check().stdout
    data = tmp_path / "docs/pictures/data/learn.json"
    data.write_text(data.read_text().replace("0.", "0.1", 1))
    done = check()
    assert done.returncode == 1
    assert done.stdout.endswith("run `make pictures`: learning.svg\n")
