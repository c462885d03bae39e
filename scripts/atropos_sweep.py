"""Run the environment scripts of a checkout of the Atropos repository, unchanged, through `palaestra.compat`.

    python scripts/atropos_sweep.py CHECKOUT           # load each script and draw an item
    python scripts/atropos_sweep.py CHECKOUT --play    # also collect two groups from a server of fixed answers
    python scripts/atropos_sweep.py CHECKOUT --play --theirs .venv-interop/bin/python    # and compare the rows

Each script runs in its own process, without a network and with stand-ins for data sets and for packages that are not
installed. The report has one line per script and the counts. It is not part of CI: the scripts are not ours.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

from palaestra_tokens.testing.fake_engine import toy_logprob
from palaestra_tokens.testing.tiny_model import save_tokenizer, train_tokenizer
from palaestra_tokens.tokenizers import FastTokenizer, load_tokenizer

ONE = Path(__file__).with_name("atropos_one_script.py")
ANSWERS = (
    "<think>\nOne and two.\n</think>\n\nThe answer is \\boxed{3}. <answer>3</answer>",
    "<think>\nOne and three.\n</think>\n\nThe answer is \\boxed{4}. <answer>4</answer> and more words.",
    "I do not know.",
    '<think>\nA tool.\n</think>\n<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>',
)


class FixedAnswers:
    """A model server whose n-th reply to a prompt is `ANSWERS[n]`, over vLLM's API of Atropos and over OpenAI's. The
    first part of the path names the run, which has its own counts."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self.tokenizer = tokenizer
        self._asked: Counter[tuple[str, str]] = Counter()

    def answer(self, request: web.Request, prompt: object) -> str:
        key = request.match_info["run"], json.dumps(prompt)
        self._asked[key] += 1
        return ANSWERS[(self._asked[key] - 1) % len(ANSWERS)]

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt = body["prompt"]["prompt_token_ids"]
        logprobs, finish = [], []
        for _ in range(body.get("n", 1)):
            ids = [*self.tokenizer.encode(self.answer(request, prompt)), self.tokenizer.stop_ids[0]]
            logprobs.append([[{str(each): toy_logprob(each, len(prompt) + at)}] for at, each in enumerate(ids)])
            finish.append("stop")
        return web.json_response({"prompt": "", "logprobs": logprobs, "finish_reasons": finish})

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        said = [self.answer(request, body["messages"]) for _ in range(body.get("n") or 1)]
        choices = [
            {"index": at, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            for at, text in enumerate(said)
        ]
        return self._completion("chat.completion", choices)

    async def complete(self, request: web.Request) -> web.Response:
        if "vllm" in request.match_info["run"]:  # Atropos' own server, which has only /generate
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.json()
        said = [self.answer(request, body["prompt"]) for _ in range(body.get("n") or 1)]
        choices = [
            {"index": at, "text": text, "finish_reason": "stop", "logprobs": None} for at, text in enumerate(said)
        ]
        return self._completion("text_completion", choices)

    def _completion(self, kind: str, choices: list[dict[str, Any]]) -> web.Response:
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        body = {"id": "c", "object": kind, "created": 0, "model": "fixed", "choices": choices, "usage": usage}
        return web.json_response(body)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fixed", "object": "model"}]})

    async def start(self) -> tuple[web.AppRunner, str]:
        app = web.Application(client_max_size=1 << 28)
        app.add_routes(
            [
                web.post("/{run}/generate", self.generate),
                web.post("/{run}/v1/chat/completions", self.chat),
                web.post("/{run}/v1/completions", self.complete),
                web.get("/{run}/v1/models", self.models),
                web.get("/{run}/health", self.models),
            ]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def scripts_in(folder: Path) -> Iterator[Path]:
    """Yield the scripts outside the package that define a class which derives from `BaseEnv`, also over other classes
    of the checkout."""
    trees = {}
    for path in sorted(folder.rglob("*.py")):
        if path.relative_to(folder).parts[0] == "atroposlib" or "tests" in path.parts:
            continue
        try:
            trees[path] = ast.parse(path.read_text())
        except SyntaxError:
            continue
    known = {"BaseEnv", "TeacherDistillationEnv", "AtroposBaseEnv", "BaseLanguageEnv"}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    while True:
        more = {node.name for node in classes if _bases(node) & known} - known
        if not more:
            break
        known |= more
    for path, tree in trees.items():
        if any(isinstance(node, ast.ClassDef) and _bases(node) & known for node in ast.walk(tree)):
            yield path


def _bases(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}


async def run_one(
    script: Path, side: str, python: str, server: str, common: list[str], url: str, timeout_s: float
) -> Any:
    run = f"{side}-{server}-{abs(hash(script))}"
    command = [python, str(ONE), str(script), "--side", side, "--server", server, "--url", f"{url}/{run}/v1", *common]
    keys = dict.fromkeys(re.findall(r"\b[A-Z][A-Z_]*(?:API_KEY|TOKEN)\b", script.read_text()), "x")
    process = await asyncio.create_subprocess_exec(
        *command,
        *("--timeout_s", str(timeout_s)),
        env=os.environ | keys | {"PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"},
        cwd=common[common.index("--packages") + 1],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, said = await asyncio.wait_for(process.communicate(), timeout_s + 60)
    except TimeoutError:
        process.kill()
        await process.wait()
        return {"stage": "?", "error": "the process did not end"}
    lines = [line for line in out.decode().splitlines() if line.startswith('{"script"')]
    if not lines:
        return {"stage": "?", "error": f"the process ended with {process.returncode}: {said.decode()[-300:]}"}
    return json.loads(lines[-1]) | {"stderr": said.decode()}


def shape(told: Any) -> str:
    groups = told.get("groups")
    return "" if groups is None else ",".join("none" if each is None else str(_count(each)) for each in groups)


def _count(group: Any) -> int:
    return sum(map(_count, group)) if isinstance(group, list) else len((group or {}).get("scores") or ())


def trained_of(groups: Any) -> Any:
    """Return the scores and the trained tokens of the rows. A prompt's tokens differ where a message spells a control
    token, which a managed server here encodes as text."""
    if isinstance(groups, list):
        return [trained_of(each) for each in groups]
    if not isinstance(groups, dict):
        return groups
    masks = groups["masks"] or []
    return groups["scores"], [[each for each in row if each != -100] for row in masks]


async def sweep(options: argparse.Namespace) -> None:
    folder = options.folder.resolve()
    scripts = [path for path in scripts_in(folder) if not options.only or re.search(options.only, str(path))]
    theirs = str(Path(options.theirs).absolute()) if options.theirs else ""
    limit = asyncio.Semaphore(options.jobs)
    with tempfile.TemporaryDirectory() as place:
        packages, model = Path(place, "packages"), Path(place, "model")
        packages.mkdir()
        model.mkdir()
        for each in folder.iterdir():
            if each.is_dir() and each.name not in ("atroposlib", ".git"):
                (packages / each.name).symlink_to(each)
        save_tokenizer(train_tokenizer(), model)
        server = FixedAnswers(load_tokenizer(str(model)))
        runner, url = await server.start()
        until = "play" if options.play else "item"
        common = ["--folder", str(folder), "--tokenizer", str(model), "--packages", str(packages), "--until", until]

        async def one(script: Path) -> Any:
            kind = "vllm" if "managed_server" in script.read_text() else "openai"
            async with limit:
                told = await run_one(script, "ours", sys.executable, kind, common, url, options.timeout_s)
                if options.theirs:
                    told["theirs"] = await run_one(script, "theirs", theirs, kind, common, url, options.timeout_s)
            name = script.relative_to(folder)
            line = f"{told['stage']:7} {name}"
            if options.play:
                line += f" rows={shape(told)}"
            if options.theirs:
                other = told["theirs"]
                same = told.get("groups") == other.get("groups") and told["stage"] == other["stage"] == "done"
                stops = told["stage"] != "done" and all(told.get(key) == other.get(key) for key in ("stage", "at"))
                told["verdict"] = "equal" if same else "stops as there" if stops else ""
                trained = told["stage"] == "done" and trained_of(told.get("groups")) == trained_of(other.get("groups"))
                told["verdict"] = told["verdict"] or ("trained tokens equal" if trained and not same else "")
                told["verdict"] = told["verdict"] or f"theirs={other['stage']} rows={shape(other)}"
                line += f" {told['verdict']} {other.get('error', '')[:120]}"
            print(line, told.get("error", "")[:200].replace("\n", " "), told.get("at", ""), flush=True)
            return {"name": str(name), **told}

        told = await asyncio.gather(*map(one, scripts))
        await runner.cleanup()
    if options.json:
        options.json.write_text(json.dumps(told, indent=1))
    print(f"\n{len(scripts)} scripts")
    for stage, count in Counter(each["stage"] for each in told).most_common():
        print(f"{count:4} {stage}")
    if options.theirs:
        equal = [each for each in told if each["verdict"] == "equal"]
        rows = [each for each in equal if any(each.get("groups") or ())]
        for verdict in ("trained tokens equal", "stops as there"):
            print(f"{sum(each['verdict'] == verdict for each in told):4} {verdict}")
        print(f"{len(equal):4} equal to atroposlib, {len(rows)} of them with rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", help="a regular expression that the script's path must match")
    parser.add_argument("--play", action="store_true")
    parser.add_argument("--theirs", help="an interpreter with atroposlib")
    parser.add_argument("--json", type=Path, help="a file for the details")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout_s", type=float, default=60.0)
    asyncio.run(sweep(parser.parse_args()))


if __name__ == "__main__":
    main()
