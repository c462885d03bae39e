"""slime's samples have exactly the sampled tokens with their log-probabilities; unscored rollouts are aborted ones."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("slime.utils.types", reason="slime is not on the path (make faces SLIME=FOLDER)")

from bug_fixing import TOKENIZER, Fixer, fix_calc
from slime.utils.types import Sample

from palaestra_integrations.slime import custom_generate, keep_scored
from palaestra_slots.core.errors import ConfigError
from palaestra_tokens.serving.token_server import TokenLoopback
from rollout_servers import toy_folder

pytestmark = pytest.mark.slots
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 200, "stop": None}


def generated(tmp_path: Path, *, spoil: Any = lambda reply: reply, task: str = "calc") -> tuple[Any, Fixer]:
    engine = Fixer()

    async def main() -> Any:
        async with TokenLoopback(engine, TOKENIZER, spoil=spoil) as server:
            host, port = server.url.removeprefix("http://").split(":")
            args = Namespace(sglang_router_ip=host, sglang_router_port=port, hf_checkpoint=str(toy_folder(tmp_path)))
            generate = custom_generate(fix_calc, folder=tmp_path, infra_retries=0, tool_parser="hermes")
            return await generate(args, Sample(index=7, metadata={"task_id": task}), dict(SAMPLING))

    return asyncio.run(main()), engine


def test_a_sample_has_every_sampled_token_once(tmp_path: Path) -> None:
    sample, engine = generated(tmp_path)
    assert (sample.reward, sample.status, sample.remove_sample) == (1.0, Sample.Status.COMPLETED, False)
    assert sum(sample.loss_mask) == sample.effective_response_length == engine.sampled
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length < len(sample.tokens)
    assert (sample.rollout_id, sample.index, sample.weight_versions) == (7, 7, ["v1"])
    assert keep_scored(None, [sample])


def test_an_unscored_rollout_is_aborted_and_its_group_left_out(tmp_path: Path) -> None:
    sample, _ = generated(tmp_path, spoil=lambda reply: {})
    assert (sample.reward, sample.status, sample.remove_sample) == (None, Sample.Status.ABORTED, True)
    assert sample.metadata["unscored"] == "api_error/engine"
    assert not keep_scored(None, [Sample(reward=1.0), [sample]])


def test_an_unknown_task_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="calk"):
        generated(tmp_path, task="calk")
    with pytest.raises(ConfigError, match="task_id"):
        generated(tmp_path, task="")
