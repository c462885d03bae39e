"""Evaluations without an environment: `EvalBase`, `eval_runner` and `evaluate_log` of `atroposlib.envs.eval`."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import ChatCompletion
from palaestra_tokens.server_group import ServerGroup

logger = logging.getLogger(__name__)


def evaluate_log(
    metrics: Mapping[str, JSON],
    eval_dir: str | None = None,
    task_name: str | None = None,
    model_name: str | None = None,
    start_time: float | None = None,
    end_time: float | None = None,
    generation_parameters: Mapping[str, JSON] | None = None,
    samples: Sequence[JSON] | None = None,
    verbose: bool = True,
) -> None:
    """Write `metrics.json` and, if there are samples, `samples.jsonl` to the folder `eval_dir`. Without a folder,
    nothing is written, and a warning is logged. Times are in seconds; `verbose` logs the metrics."""
    if eval_dir is None:
        logger.warning("eval_dir is not set, so the evaluation's results are not saved")
        return
    folder = Path(eval_dir)
    folder.mkdir(parents=True, exist_ok=True)
    now = time.time()
    taken = (now if end_time is None else end_time) - (now if start_time is None else start_time)
    general = {
        "model_name": model_name,
        "total_evaluation_time_seconds": str(taken),
        "generation_parameters": dict(generation_parameters or {}),
    }
    report = {"config_general": general, "results": {f"atropos|{task_name}|0": metrics, "all": metrics}}
    (folder / "metrics.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
    if samples:
        lines = "".join(json.dumps(sample) + "\n" for sample in samples)
        (folder / "samples.jsonl").write_text(lines, encoding="utf-8")
    if verbose:
        logger.info("%s: %s", task_name, ", ".join(f"{name} {value}" for name, value in metrics.items()))


class EvalBase(ABC):
    """An evaluation of a model server. Subclasses return their items from `setup_data` and score one in `run_item`;
    calling the instance runs all of them concurrently. Keyword arguments become attributes."""

    def __init__(self, pass_at_n: int = 1, pass_at_n_samples: int = 1, **attributes: Any) -> None:
        self.pass_at_n = pass_at_n
        self.pass_at_n_samples = pass_at_n_samples
        for name, value in attributes.items():
            setattr(self, name, value)
        self.data = self.setup_data()

    @abstractmethod
    def setup_data(self) -> list[Any]:
        """Return the items."""

    @abstractmethod
    async def run_item(self, server: ServerGroup, data_item: Any) -> tuple[dict[str, float], JSON]:
        """Return an item's metrics, with the same names for every item, and its sample for the record."""

    def get_generation_params(self) -> dict[str, JSON]:
        """Return the sampling settings of a request: the attributes `temperature`, `top_p` and `max_tokens`."""
        return {
            "temperature": getattr(self, "temperature", 0.0),
            "n": max(self.pass_at_n_samples, self.pass_at_n),
            "top_p": getattr(self, "top_p", 1.0),
            "max_tokens": getattr(self, "max_tokens", -1),
        }

    async def chat_completion(self, server: ServerGroup, messages: Sequence[Message]) -> ChatCompletion:
        return await server.chat_completion(messages=messages, **self.get_generation_params())

    async def __call__(self, server_manager: ServerGroup) -> dict[str, float]:
        """Run all items, record the means of their metrics, and return them."""
        start = time.time()
        results = await asyncio.gather(*(self.run_item(server_manager, item) for item in self.data))
        end = time.time()
        found = [metrics for metrics, *_ in results]
        means = {name: sum(each[name] for each in found) / len(found) for name in found[0]} if found else {}
        samples = f":{self.pass_at_n_samples}" if self.pass_at_n != self.pass_at_n_samples else ""
        evaluate_log(
            means,
            eval_dir=getattr(self, "eval_dir", None),
            task_name=f"{type(self).__name__}@{self.pass_at_n}{samples}",
            model_name=server_manager.servers[0].config.model_name,
            start_time=start,
            end_time=end,
            generation_parameters=self.get_generation_params(),
            samples=[result[1] for result in results],
            verbose=getattr(self, "verbose", False),
        )
        return means


async def eval_runner(eval_env: EvalBase) -> dict[str, float]:
    """Run an evaluation against the server of the command line's `--server-url` and `--model-name`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--server-url", default="http://localhost:8000", help="the address of the model server")
    parser.add_argument("--model-name", default="default", help="the model's name at the server")
    given = parser.parse_args()
    config = APIServerConfig(base_url=given.server_url, model_name=given.model_name, health_check=False)
    async with ServerGroup(config) as servers:
        return await eval_env(servers)
