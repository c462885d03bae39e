"""What classes written for Atropos rely on: their own settings, keys of other releases, tables, and the tokenizer."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from palaestra_contract import BaseEnv, BaseEnvConfig
from palaestra_contract.base_env import ClassForm
from palaestra_contract.chat_tokenizer import ChatTokenizer
from palaestra_contract.class_environment import CollectedEnvironment
from palaestra_contract.helpers.teacher_distillation import TeacherDistillationConfig
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_tokens import APIServerConfig
from palaestra_tokens.engines.token_engine import TokenChat
from palaestra_tokens.server_group import ServerGroup
from palaestra_tokens.testing.fake_engine import toy_tokenizer


class OwnConfig(BaseEnvConfig):
    """Settings that the class does not name in `env_config_cls`."""

    mine: int = 1


class Tables(BaseEnv):
    """Makes its own table of rollouts, as Atropos' environments do."""

    name = "tables"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        return OwnConfig(mine=2, tokenizer_name="none"), [APIServerConfig(model_name="m")]

    async def setup(self) -> None: ...

    async def get_next_item(self) -> JSON:
        return None

    async def evaluate(self, *args: JSON, **kwargs: JSON) -> JSON: ...

    async def collect_trajectory(self, item: JSON) -> JSON:
        return None, []

    async def create_rollout_table(self, wandb_metrics: dict[str, JSON]) -> dict[str, JSON]:
        table = Table(["text", "score", "why"])
        for group in self.rollouts_for_wandb:
            table.data += [list(rollout) for rollout in group]
        wandb_metrics["train/rollouts"] = table
        self.rollouts_for_wandb = []
        return wandb_metrics


class Table:
    """The parts of `wandb.Table` that are read."""

    def __init__(self, columns: list[str]) -> None:
        self.columns, self.data = columns, list[list[Any]]()


@pytest.fixture
def env() -> Tables:
    return Tables(OwnConfig(), [])


def test_the_settings_that_config_init_returns_are_the_classes_settings() -> None:
    form = ClassForm(Tables)
    assert form.config_type() is OwnConfig
    config, _ = form.defaults()
    assert isinstance(config, OwnConfig)
    assert Tables(config, []).config is config


def test_settings_of_other_releases_are_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = OwnConfig(mine=3, max_num_workerz=4, obsolete=5)
        server = APIServerConfig(model_name="m", weight=1.0)
        OwnConfig(obsolete=5)
        APIServerConfig(weight=1.0)
    assert (config.mine, server.model_name) == (3, "m")
    assert [record.getMessage() for record in caplog.records] == [
        "OwnConfig ignores settings that it does not have: max_num_workerz (did you mean max_num_workers?), obsolete",
        "APIServerConfig ignores settings that it does not have: weight",
    ]


def test_values_that_atropos_takes() -> None:
    config = BaseEnvConfig(min_items_sent_before_logging=0, inference_weight=-1, steps_per_eval=0)
    assert (config.min_items_sent_before_logging, config.inference_weight) == (0, -1.0)


async def test_a_table_of_rollouts_is_shown(env: Tables) -> None:
    environment = CollectedEnvironment(env)
    env.rollouts_for_wandb = [[("first", 0.5, "short"), ("second", 1, "right")]]  # type: ignore[list-item]
    assert environment.shown() == [("first", 0.5), ("second", 1.0)]
    env.completion_lengths = [3, 4]
    figures = await environment.figures()
    assert figures == {}
    assert env.rollouts_for_wandb == []
    assert environment.shown() == [("first", 0.5), ("second", 1.0)]
    assert env.completion_lengths == []


def test_the_tokenizer_is_a_whole_one_and_can_be_replaced(env: Tables) -> None:
    assert env.tokenizer is None
    plain = toy_tokenizer()
    env.server = ServerGroup([TokenChat(APIServerConfig(model_name="m"), tokenizer=plain)])
    tokenizer = env.tokenizer
    assert isinstance(tokenizer, ChatTokenizer)
    assert env.tokenizer is tokenizer
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False).startswith("<|im_start|>")
    managed = env.server.managed_server(tokenizer=tokenizer)  # type: ignore[attr-defined]
    assert managed._format.tokenizer is plain  # the ledger's encoding adds no special tokens
    env.tokenizer = plain
    assert env.tokenizer is plain


def test_a_teacher_is_refused() -> None:
    TeacherDistillationConfig(teacher_enabled=False).check_runnable()
    with pytest.raises(ConfigError, match="teacher_enabled to false"):
        TeacherDistillationConfig(teacher_enabled=True).check_runnable()
