"""The contract's fields and defaults, and what this version refuses."""

import os

import pytest

from golden_messages import raises
from palaestra.agent.budget import Budget
from palaestra.envs.config.build import agent_settings
from palaestra.envs.config.fields import BaseEnvConfig, EvalHandlingEnum, HermesAgentEnvConfig
from palaestra.envs.run.run import are_elsewhere, concurrency
from palaestra.rollouts.idle_limits import IDLE_LIMITS
from palaestra_slots.core.config import ConfigLayer, all_settings, merge
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Prices
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig

CONTRACT = {
    "group_size": 4,
    "max_num_workers": -1,
    "max_eval_workers": 16,
    "max_num_workers_per_node": 8,
    "steps_per_eval": 100,
    "max_token_length": 2048,
    "eval_handling": EvalHandlingEnum.STOP_TRAIN,
    "eval_limit_ratio": 0.5,
    "inference_weight": 1.0,
    "max_batches_offpolicy": 3,
    "use_wandb": True,
    "rollout_server_url": "http://localhost:8000",
    "total_steps": 1000,
    "wandb_name": None,
    "num_rollouts_to_keep": 32,
    "num_rollouts_per_group_for_logging": 1,
    "ensure_scores_are_not_same": True,
    "data_path_to_save_groups": None,
    "data_dir_to_save_evals": None,
    "min_items_sent_before_logging": 2,
    "include_messages": False,
    "min_batch_allocation": None,
    "worker_timeout": 600,
    "enabled_toolsets": None,
    "disabled_toolsets": None,
    "distribution": None,
    "max_agent_turns": 30,
    "system_prompt": None,
    "agent_temperature": 1.0,
    "terminal_backend": "local",
    "terminal_timeout": 120,
    "dataset_name": None,
    "dataset_split": "train",
    "prompt_field": "prompt",
    "tool_pool_size": 128,
    "tool_call_parser": "hermes",
    "extra_body": None,
    "tool_pool_mode": "default",
    "allow_network": True,
    "require_sandbox": False,
    "purge_job_on_start": False,
    "purge_job_on_shutdown": True,
    "acquire_timeout_s": 30,
    "nomad_address": "http://localhost:4646",
    "sandbox_job_id": "atropos-sandbox",
    "sandbox_image": "atropos-sandbox:local",
    "slots_per_container": 10,
    "min_containers": 1,
    "max_containers": 10,
    "privileged": False,
    "driver": "docker",
    "singularity_image": None,
    "modal_app_name": "atropos-sandbox",
    "modal_image": "python:3.11",
    "modal_gpu": None,
    "modal_cpu": 1.0,
    "modal_memory": 2048,
    "modal_slots_per_sandbox": 10,
    "modal_min_sandboxes": 1,
    "modal_max_sandboxes": 5,
    "modal_idle_timeout": 120,
    "modal_max_lifetime": 3600,
    "modal_acquire_timeout": 60,
    "modal_execution_timeout": 30,
    "modal_secrets": "",
    "modal_env_vars": "",
}


def test_the_contracts_fields_have_the_contracts_defaults() -> None:
    config = HermesAgentEnvConfig()
    assert {name: getattr(config, name) for name in CONTRACT} == CONTRACT


def test_every_field_is_described() -> None:
    for name, field in all_settings(HermesAgentEnvConfig).items():
        assert field.description, name


def test_a_group_of_one_is_not_dropped_for_equal_scores() -> None:
    assert BaseEnvConfig(group_size=1).ensure_scores_are_not_same is False
    assert BaseEnvConfig(group_size=1, ensure_scores_are_not_same=True).ensure_scores_are_not_same is True


def test_a_larger_group_size_from_a_flag_undoes_that_default() -> None:
    own = BaseEnvConfig(group_size=1)
    values = {name: getattr(own, name) for name in own.model_fields_set}
    merged = merge(BaseEnvConfig, [ConfigLayer("config_init", values), ConfigLayer("command line", {"group_size": 8})])
    assert merged.value.ensure_scores_are_not_same is True


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("isolation", "vm", "not one of best, full, userns, confined, none"),
        ("otel_endpoint", "localhost:4318", "must be a URL of OTLP over HTTP"),
        ("group_size", 0, "greater than or equal to 1"),
        ("group_size", True, "group_size True: must be a number"),
        ("metrics_port", False, "metrics_port False: must be a number"),
        ("data_path_to_save_groups", "a/b.html", "specify a .jsonl file"),
        ("rollout_server_url", "localhost:8000", "http://localhost:8000"),
        ("total_steps", -2, "greater than or equal to -1"),
    ],
)
def test_what_cannot_work_is_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        merge(HermesAgentEnvConfig, [ConfigLayer("test", {field: value})])


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (
            {"tool_pool_mode": "daytona"},
            "tool_pool_mode 'daytona' .from a.yaml. is not available .* --env.tool_pool_mode",
        ),
        ({"tool_pool_mode": "locl"}, "tool_pool_mode 'locl' .* is unknown. Did you mean local"),
        ({"terminal_backend": "daytona"}, "terminal_backend 'daytona' .* Set --env.terminal_backend local"),
    ],
)
def test_a_backend_is_refused_when_a_run_starts_and_not_before(values: dict[str, str], names: str) -> None:
    merged = merge(HermesAgentEnvConfig, [ConfigLayer("a.yaml", values)])
    with pytest.raises(ConfigError, match=names):
        merged.value.check_runnable({f"env.{name}": source for name, source in merged.sources.items()})


def test_a_pool_mode_that_is_named_makes_the_terminal_backend_irrelevant() -> None:
    HermesAgentEnvConfig(terminal_backend="modal", tool_pool_mode="local").check_runnable()


def test_toolsets_come_from_one_place() -> None:
    with raises(ConfigError, "enabled_toolsets"):
        HermesAgentEnvConfig(enabled_toolsets=["terminal"], distribution="science")


def test_a_limit_of_one_stage_leaves_the_others() -> None:
    limits = HermesAgentEnvConfig(idle_limits={"tool": 5.0, "model": 0}).idle_limits
    assert (limits["tool"], limits["model"], limits["grade"]) == (5.0, 0.0, IDLE_LIMITS["grade"])
    for wrong, says in (
        ({"tol": 5.0}, "stage 'tol'"),
        ({"tool": -1.0}, "the limit of tool must be a number of seconds"),
    ):
        with pytest.raises(ConfigError, match=says):
            HermesAgentEnvConfig(idle_limits=wrong)


def test_a_cost_needs_prices() -> None:
    with pytest.raises(ConfigError, match="max_cost needs prompt_price"):
        HermesAgentEnvConfig(max_cost=1.0)
    with raises(ConfigError, "prompt_price", "completion_price"):
        HermesAgentEnvConfig(prompt_price=1.0)


def test_what_a_rollout_may_use_comes_from_the_settings() -> None:
    config = HermesAgentEnvConfig(
        max_rollout_tokens=9_000,
        max_rollout_completion_tokens=800,
        max_rollout_output_bytes=70_000,
        max_rollout_cost=0.5,
        prompt_price=3,
        completion_price=15,
        worker_timeout=0,
    )
    prices = Prices(3, 15)
    settings = agent_settings(config)
    wanted = Budget(tokens=9_000, completion_tokens=800, output_bytes=70_000, cost=0.5, prices=prices)
    assert (settings.budget, settings.prices) == (wanted, prices)
    assert agent_settings(HermesAgentEnvConfig()).budget == Budget(wall_s=600)
    with pytest.raises(ConfigError, match="max_rollout_cost needs prompt_price"):
        HermesAgentEnvConfig(max_rollout_cost=1)


def test_reasoning_settings_reach_the_agent() -> None:
    config = HermesAgentEnvConfig(
        reasoning_effort="low", max_reasoning_tokens=500, extra_body={"provider": {"order": ["a"]}}, system_prompt="Go."
    )
    assert agent_settings(config).extra_body == {
        "reasoning_effort": "low",
        "reasoning": {"max_tokens": 500},
        "provider": {"order": ["a"]},
    }
    assert agent_settings(config).system_prompt == "Go."
    thinking = agent_settings(HermesAgentEnvConfig(thinking_mode=True, system_prompt="Go.")).system_prompt
    assert thinking is not None
    assert "<think>" in thinking
    assert thinking.endswith("Go.")
    own = agent_settings(HermesAgentEnvConfig(custom_thinking_prompt="Ponder.", thinking_mode=True))
    assert own.system_prompt == "Ponder."


def test_workers_per_model_server_and_of_evaluations() -> None:
    assert concurrency(BaseEnvConfig(max_num_workers_per_node=3), 2) == 6
    assert concurrency(BaseEnvConfig(max_num_workers_per_node=3, max_num_workers=5), 2) == 5
    assert BaseEnvConfig(max_eval_workers=2).evaluation_workers(8) == 2
    assert BaseEnvConfig().evaluation_workers(64) == 64


class TenSlots(LocalBackend):
    @property
    def capacity(self) -> int:
        return 10


@pytest.mark.slots
@pytest.mark.parametrize(
    ("backend", "more", "groups"),
    [
        ("modal", {}, 5),
        ("ssh=a,b", {}, 5),
        ("docker=ssh://a", {}, 5),
        ("docker", {"docker_hosts": ["ssh://a"]}, 5),
        ("docker", {}, None),
        ("docker modal=overflow", {}, None),
        ("local", {}, None),
        ("modal", {"max_num_workers": 3}, 3),
    ],
)
async def test_slots_on_other_machines_decide_how_many_groups_run(
    backend: str, more: dict[str, JSON], groups: int | None
) -> None:
    config = HermesAgentEnvConfig(tool_pool_mode=backend, group_size=2, **more)

    here = max(2, 2 * (os.cpu_count() or 1))
    async with SlotPool(SlotPoolConfig(), TenSlots()) as pool:
        result = pool.limit.slots if are_elsewhere(config, pool) else None
    assert concurrency(config, 1, result) == (here if groups is None else groups)
