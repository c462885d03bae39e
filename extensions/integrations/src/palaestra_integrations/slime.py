"""Lets slime generate samples by rolling out an environment, with exact tokens from slime's SGLang router and the
environment's rewards.

    generate = custom_generate("my_env.py")        # --custom-generate-function-path my_module.generate

Each row of slime's data set has `task_id` in its metadata (`--metadata-key`). Each segment of a rollout's tokens is a
`Sample`; the segments of a rollout share one `rollout_id`. A rollout that is unscored or has no tokens becomes one
sample with the status `ABORTED`, `remove_sample` and no reward. In fully asynchronous training, slime queues the
rollout's group again. Otherwise, set `--dynamic-sampling-filter-path palaestra_integrations.slime.keep_scored`: slime
then leaves the group out and draws a new one.

Source: `slime.rollout.sglang_rollout` and `Sample` of August 2026. This module does not import slime.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

from palaestra import JSON, ConfigError, ExportedRow, RolloutFunction, Unscored, training_rows

_SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens")

Generate = Callable[[Any, Any, Mapping[str, JSON]], Awaitable[Any]]


def custom_generate(env: object, **settings: Any) -> Generate:
    """Return a function for `--custom-generate-function-path`. The tokenizer is that of slime's `--hf-checkpoint`, and
    slime sets the temperature, `top_p`, `top_k` and the maximum length of a reply. `settings` are those of
    `palaestra.RolloutFunction` except `server_type`, and override these values. Rollouts with different sampling
    settings, such as those of training and evaluation, belong to different runs."""
    rollouts: dict[str, RolloutFunction] = {}

    async def generate(args: Any, sample: Any, sampling_params: Mapping[str, JSON]) -> Any:
        """Play one rollout of the sample's task. Raises `ConfigError` for a sample without `task_id`."""
        task = (sample.metadata or {}).get("task_id")
        if not task:
            raise ConfigError("the sample's metadata has no task_id: set --metadata-key to the column that has it")
        asked = str([sampling_params.get(name) for name in _SAMPLING])
        if asked not in rollouts:
            rollouts[asked] = _rollout_function(env, args, sampling_params, settings)
        result = await rollouts[asked](task, f"http://{args.sglang_router_ip}:{args.sglang_router_port}")
        rows = [] if isinstance(result, Unscored) else training_rows(result.trajectory)
        if not rows:
            sample.metadata["unscored"] = result.kind if isinstance(result, Unscored) else "without tokens"
            sample.status, sample.remove_sample, sample.reward = type(sample).Status.ABORTED, True, None
            return sample
        assert not isinstance(result, Unscored)
        sample.metadata.update(result.trajectory.verdict)
        made = [_fill(copy.deepcopy(sample), row) for row in rows]
        for each in made:
            each.rollout_id = sample.index if sample.rollout_id is None else sample.rollout_id
        return made[0] if len(made) == 1 else made

    return generate


def keep_scored(args: Any, samples: Iterable[Any], **_: Any) -> bool:
    """Return whether every rollout of a group has a reward. Pass this function to `--dynamic-sampling-filter-path`."""
    return all(sample.reward is not None for sample in _flat(samples))


def _flat(samples: Iterable[Any]) -> Iterator[Any]:
    for each in samples:
        yield from each if isinstance(each, list) else [each]


def _rollout_function(
    env: object, args: Any, sampling: Mapping[str, JSON], settings: Mapping[str, Any]
) -> RolloutFunction:
    given: dict[str, Any] = {
        "tokenizer_name": args.hf_checkpoint,
        "agent_temperature": sampling["temperature"],
        "max_token_length": sampling["max_new_tokens"],
        "extra_body": {name: sampling[name] for name in ("top_p", "top_k") if name in sampling},
    }
    return RolloutFunction(env, server_type="sglang", **{**given, **settings})


def _fill(sample: Any, row: ExportedRow) -> Any:
    """Return the sample with the tokens of one segment: first the prompt's tokens, then `response_length` tokens."""
    sample.tokens = [*row.prompt_ids, *row.completion_ids]
    sample.response_length = len(row.completion_ids)
    sample.loss_mask, sample.rollout_log_probs = row.mask, row.logprobs
    sample.weight_versions = list(dict.fromkeys(version for _, _, version in row.versions if version))
    sample.reward, sample.remove_sample = row.reward, False
    ended = type(sample).Status.TRUNCATED if row.finish_reason == "length" else type(sample).Status.COMPLETED
    sample.status = ended
    return sample
