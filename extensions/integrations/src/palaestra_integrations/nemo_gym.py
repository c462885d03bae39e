"""Lets NeMo Gym roll out an environment through an agent server, whose `/run` plays a rollout, grades it and returns
the result.

    # app.py of your agent server
    from palaestra_integrations.nemo_gym import EnvironmentAgent
    if __name__ == "__main__": EnvironmentAgent.run_webserver()

A row has `task_id` next to `responses_create_params`. Model calls go to `model_base_url`, or through the model server
in the configuration. If `model_base_url` is the address of vLLM or SGLang itself and `settings` has `server_type`, the
output contains exactly the sampled tokens with their log-probabilities.

A rollout with an official verdict or labels has them as `official` and `labels`. A rollout without a reward has
`mask_sample`, `failure_kind` and `failure_reason`. Its reward is 0.0, because the protocol requires one; this server's
`/aggregate_metrics` leaves it out. `/verify` takes a `rollout_id` and repeats the answer that `/run` gave for this
rollout.

Needs the package `nemo-gym`. Source: `SimpleResponsesAPIAgent` and `openai_utils` of NeMo Gym 0.4; the fields of masked
samples are those of 0.7.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, HTTPException
from nemo_gym.base_resources_server import AggregateMetrics, AggregateMetricsRequest, BaseRunRequest, BaseVerifyResponse
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef
from nemo_gym.global_config import get_first_server_config_dict
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from palaestra import JSON, ConfigError, RolloutFunction, Trajectory, Unscored
from palaestra_integrations.turns import TurnTokens, response_items, sampled_turns

KEPT_ANSWERS = 1024
"""The number of recent rollouts that `/verify` can return."""


class EnvironmentAgentConfig(BaseResponsesAPIAgentConfig):  # type: ignore[misc]
    """`env` is a file or a name, as for `palaestra run`; `settings` are those of `palaestra.RolloutFunction`."""

    env: str
    settings: dict[str, Any] = Field(default_factory=dict)
    model_server: ModelServerRef | None = None
    model_base_url: str = ""
    model: str = "policy"


class EnvironmentRunRequest(BaseRunRequest):  # type: ignore[misc]
    """One row of the data set."""

    model_config = ConfigDict(extra="allow")
    task_id: str


class EnvironmentVerifyResponse(BaseVerifyResponse):  # type: ignore[misc]
    """A rollout, graded or masked."""

    model_config = ConfigDict(extra="allow")
    rollout_id: str = ""
    mask_sample: bool = False
    failure_kind: str | None = None
    failure_reason: str | None = None


class RolloutReference(BaseModel):
    """Names the rollout to verify."""

    model_config = ConfigDict(extra="allow")
    rollout_id: str


class EnvironmentAgent(SimpleResponsesAPIAgent):  # type: ignore[misc]
    """The agent server. All its rollouts belong to one run."""

    config: EnvironmentAgentConfig
    _rollout: RolloutFunction = PrivateAttr()
    _answers: dict[str, EnvironmentVerifyResponse] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: Any) -> None:
        self._rollout = RolloutFunction(self.config.env, **self.config.settings)
        super().model_post_init(context)

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/verify")(self.verify)
        app.router.add_event_handler("shutdown", self._rollout.aclose)
        return app

    async def run(self, body: EnvironmentRunRequest) -> EnvironmentVerifyResponse:
        """Play and grade one rollout. Responds with status 422 for an unknown task or a wrong setting."""
        try:
            result = await self._rollout(body.task_id, self._address(), model=self.config.model)
        except ConfigError as error:
            raise HTTPException(422, str(error)) from None
        row, played = body.model_dump(), result.trajectory
        name = played.rollout_id if played is not None else f"{body.task_id}-{time.time_ns():x}"
        row |= {"response": self._response(name, played), "rollout_id": name, "reward": 0.0}
        if isinstance(result, Unscored):
            row |= {"mask_sample": True, "failure_kind": result.kind, "failure_reason": result.error}
        else:
            row |= {"reward": result.reward, **result.trajectory.verdict}
        answer: EnvironmentVerifyResponse = EnvironmentVerifyResponse.model_validate(row)
        self._answers[name] = answer
        if len(self._answers) > KEPT_ANSWERS:
            del self._answers[next(iter(self._answers))]
        return answer

    async def verify(self, body: RolloutReference) -> EnvironmentVerifyResponse:
        """Return the graded rollout. Responds with status 404 for a rollout that is not among this server's most recent
        rollouts."""
        if body.rollout_id not in self._answers:
            raise HTTPException(404, f"the rollout {body.rollout_id!r} is not among this server's most recent rollouts")
        return self._answers[body.rollout_id]

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        """Play a rollout of the task in the request's metadata and return its output without the reward. Responds with
        status 422 if the metadata has no `task_id`."""
        task = (body.metadata or {}).get("task_id")
        if not task:
            raise HTTPException(422, "the metadata of the request has no task_id: send rows to /run")
        return (await self.run(EnvironmentRunRequest(responses_create_params=body, task_id=task))).response

    async def aggregate_metrics(self, body: AggregateMetricsRequest) -> AggregateMetrics:
        """Return metrics of the rollouts that have a reward."""
        scored = [each for each in body.verify_responses if not each.get("mask_sample")]
        return await super().aggregate_metrics(AggregateMetricsRequest(verify_responses=scored))

    def _address(self) -> str:
        if self.config.model_base_url:
            return self.config.model_base_url
        if self.config.model_server is None:
            raise ConfigError("the agent's configuration has neither model_base_url nor model_server; set one of them")
        server = get_first_server_config_dict(self.server_client.global_config_dict, self.config.model_server.name)
        return f"http://{server.host}:{server.port}/v1"

    def _response(self, name: str, played: Trajectory | None) -> JSON:
        return {
            "id": f"resp_{name}",
            "created_at": time.time(),
            "model": self.config.model,
            "object": "response",
            "output": [] if played is None else output_items(played),
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }


def output_items(played: Trajectory) -> list[JSON]:
    """Return the replies and tool results of a rollout as output items of a response. The last item of each reply has
    its tokens, if they are recorded. Raises `ConfigError` if tokens are recorded for more or fewer calls than there are
    replies (compaction, sub-agents), because they then cannot be assigned to the items.
    """
    replies = [message for message in played.messages if message["role"] == "assistant"]
    turns = list(sampled_turns(played)) if played.ledger is not None else []
    if turns and len(turns) != len(replies):
        raise ConfigError(f"{played.rollout_id} has {len(turns)} model calls, but {len(replies)} replies in history")
    tokens, items = iter(turns), list[JSON]()
    for message in played.messages:
        if message["role"] in ("assistant", "tool"):
            made = list(response_items(message, f"{played.rollout_id}_{len(items)}"))
            if message["role"] == "assistant":
                made[-1] |= _training_fields(next(tokens, None))
            items += made
    return items


def _training_fields(turn: TurnTokens | None) -> dict[str, JSON]:
    if turn is None:
        return {}
    return {
        "prompt_token_ids": turn.prompt_ids,
        "generation_token_ids": turn.completion_ids,
        "generation_log_probs": turn.logprobs,
    }
