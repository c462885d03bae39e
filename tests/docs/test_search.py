"""The search of the documentation site, run as a browser runs it: Sphinx's script and index, in Node."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")

SEARCH = """
const fs = require("fs"), vm = require("vm"), [site, ...queries] = process.argv.slice(1);
const ready = () => undefined, page = { getElementById: () => null, addEventListener: ready };
const context = vm.createContext({
  document: page, window: {}, localStorage: { setItem: ready }, _ready: ready, _: (text) => text,
  SPHINX_HIGHLIGHT_ENABLED: false, console,
});
for (const name of ["_static/searchtools.js", "_static/language_data.js", "searchindex.js"]) {
  vm.runInContext(fs.readFileSync(`${site}/${name}`, "utf-8"), context);
  if (name.endsWith("language_data.js")) vm.runInContext("Stemmer = window.Stemmer || Stemmer", context);
}
const results = queries.map((query) => {
  context.query = query;
  return vm.runInContext("Search._performSearch(...Search._parseQuery(query))", context).reverse();
});
console.log(JSON.stringify(results.map((found) => found.map(([page, , anchor]) => page + anchor))));
"""

QUESTIONS = {
    "automatically retry failed samples": "troubleshooting",
    "extremely slow docker sandbox": "troubleshooting",
    "log viewer large logs": "troubleshooting",
    "infinite loop will not terminate": "troubleshooting",
    "tokenization mismatch multi-turn": "troubleshooting",
    "podman rootless": "troubleshooting",
    "no space left on device": "troubleshooting",
    "pre-pull docker images rate limit": "troubleshooting",
    "only resolved trajectories": "training",
    "run with local LLMs": "troubleshooting",
    "sandbox timeout 24 hours": "troubleshooting",
    "concurrent environments": "operations/limits",
    "resume re-runs discarded samples": "batch",
    "git history future commits": "environments/checking",
    "compaction context window": "troubleshooting",
    "off-policy importance sampling": "train",
    "docker compose multi-container": "troubleshooting",
    "cloud sandbox daytona modal": "backends",
    "LLM as judge grader": "environments/grading",
    "thinking stripped from history": "troubleshooting",
    "docker disable network access": "troubleshooting",
    "MCP tools": "tools/mcp",
    "set cost limit": "troubleshooting",
    "DPO preference data": "training",
    "VLM support": "troubleshooting",
    "huggingface dataset": "environments/evaluating",
    "run without docker": "troubleshooting",
    "docker containers accumulate": "troubleshooting",
    "OpenHands agent": "agents",
    "reward function whole trajectory": "environments/grading",
    "install": "troubleshooting",
    "write environment": "environments/writing",
    "hidden tests": "environments/recipes",
    "simulated user": "environments/writing",
    "tools database": "environments/recipes",
    "pandas": "environments/recipes",
    "judge": "environments/recipes",
    "reward hacking": "troubleshooting",
    "compare models table": "environments/evaluating",
    "repeat failed tasks": "environments/evaluating",
    "grade again": "environments/evaluating",
    "view rollout": "tutorial/4-debug-a-run",
    "ollama": "troubleshooting",
    "cost limit": "operations/limits",
    "train laptop": "train/small_models",
    "export tokens": "training",
    "undo": "chat",
    "continue conversation": "chat",
    "publish environment": "environments/recipes",
}
"""Questions from the issue lists of other projects and of newcomers, as one would type them, and the page that answers
each."""


def built(source: Path, site: Path) -> Path:
    argv = ["-q", "-W", "--keep-going", "-b", "html", str(source), str(site)]
    subprocess.run([sys.executable, "-m", "sphinx", *argv], check=True)
    return site


def results(site: Path, *queries: str) -> list[list[str]]:
    """The pages that the search of the site finds for each query, the best first, with their anchors."""
    ran = subprocess.run(["node", "-e", SEARCH, str(site), *queries], check=True, capture_output=True, text=True)
    found: list[list[str]] = json.loads(ran.stdout)
    return found


@pytest.fixture(scope="module")
def small_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "conf.py").write_text(f"html_search_scorer = {str(DOCS / 'search.js')!r}\n")
    pages = {
        "index": "Contents\n========\n\n.. toctree::\n\n   animals\n   plants\n",
        "animals": "Animals\n=======\n\nThe cat sleeps.\n\nFeeding a dog\n-------------\n\nThe dog eats.\n",
        "plants": "Plants\n======\n\nThe dog sleeps below the oak.\n",
    }
    for name, text in pages.items():
        (folder / f"{name}.rst").write_text(text)
    return built(folder, folder / "site")


def test_a_page_without_one_of_the_words_is_found(small_site: Path) -> None:
    (found,) = results(small_site, "cat sleeps unicorn")
    assert found[:2] == ["animals", "plants"]  # Sphinx alone finds nothing


def test_a_heading_leads_to_its_section(small_site: Path) -> None:
    (found,) = results(small_site, "dog feeding")
    assert found[0] == "animals#feeding-a-dog"


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_questions_of_users_find_the_page_that_answers_them(site: Path) -> None:
    found = dict(zip(QUESTIONS, results(site, *QUESTIONS), strict=True))
    pages = {query: [each.partition("#")[0] for each in ranked[:2]] for query, ranked in found.items()}
    assert {query: pages[query] for query, page in QUESTIONS.items() if page not in pages[query]} == {}
