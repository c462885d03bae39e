"""Reward functions and their registry, which Atropos environments import from `atroposlib.envs.reward_fns`.

A reward function scores a list of completions. New environments score with `@env.score` or `compute_reward`, whose
errors leave a rollout unscored; here, as there, the error of a reward function is logged and its scores are 0.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from palaestra_slots.core.types import JSON

logger = logging.getLogger(__name__)


class RewardFunction(ABC):
    """Scores completions. Subclasses implement `compute`; a call applies `weight` to its scores."""

    def __init__(self, weight: float = 1.0, name: str | None = None, **config: JSON) -> None:
        self.weight = weight
        self._name = name
        self.config = config
        self.wandb_logger: Any = None

    @property
    def name(self) -> str:
        return self._name or type(self).__name__.lower()

    @abstractmethod
    def compute(self, completions: Sequence[JSON], **context: JSON) -> list[float]:
        """Return one score per completion. The context has what the environment knows, such as `solution`."""

    def __call__(self, completions: Sequence[JSON], **context: JSON) -> list[float]:
        """Return the weighted scores; zeros if `compute` raises an error, which is logged."""
        try:
            scores = self.compute(completions, **context)
            weighted = [score * self.weight for score in scores]
            self.log_metrics(scores, weighted)
        except Exception:
            logger.exception("the reward function %s failed; its scores are 0", self.name)
            return [0.0] * len(completions)
        return weighted

    def set_wandb_logger(self, logger: Any) -> None:
        """Set the object whose `log` gets the metrics of each call."""
        self.wandb_logger = logger

    def log_metrics(self, raw_rewards: Sequence[float], weighted_rewards: Sequence[float]) -> None:
        if not self.wandb_logger or not raw_rewards:
            return
        numbers = {
            "mean_raw": sum(raw_rewards) / len(raw_rewards),
            "mean_weighted": sum(weighted_rewards) / len(weighted_rewards),
            "min": min(raw_rewards),
            "max": max(raw_rewards),
        }
        self.wandb_logger.log({f"reward/{self.name}/{key}": value for key, value in numbers.items()})

    @staticmethod
    def get_content(completion: JSON) -> str:
        """Return the text of a completion: a string, an assistant message, an object with such a `message`, or a
        conversation, of which the first assistant message counts. Anything else has no text."""
        if isinstance(completion, str):
            return completion
        candidates = completion if isinstance(completion, list) else [completion]
        if isinstance(completion, dict):
            candidates = [completion, completion.get("message")]
        for message in candidates:
            if isinstance(message, dict) and message.get("role") == "assistant" and "content" in message:
                text: str = message["content"]
                return text
        return ""


class LegacyFunctionWrapper(RewardFunction):
    """A plain function as a reward function. A single score counts for every completion."""

    def __init__(self, func: Callable[..., Any], weight: float = 1.0, **config: JSON) -> None:
        super().__init__(weight=weight, **config)
        self.func = func

    @property
    def name(self) -> str:
        return self.func.__name__

    def compute(self, completions: Sequence[JSON], **context: JSON) -> list[float]:
        scores = self.func(completions, **context)
        return scores if isinstance(scores, list) else [scores] * len(completions)


class RewardRegistry:
    """Reward functions by name. A class is registered under its name in lower case without `reward` at its end."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def register(self, cls: type | None = None, name: str | None = None) -> Any:
        """Register a class, as `@registry.register` or `@registry.register(name=…)`. Returns the class."""

        def registered(kind: type) -> type:
            if not inspect.isclass(kind) or not issubclass(kind, RewardFunction):
                raise TypeError(f"{getattr(kind, '__name__', kind)} is not a subclass of RewardFunction")
            self._known[(name or kind.__name__.lower()).removesuffix("reward").lower()] = kind
            return kind

        return registered if cls is None else registered(cls)

    def register_function(self, name: str, function: Any) -> None:
        self._known[name] = function

    def get(self, name: str) -> Any:
        """Return the class or function of this name. Raises `ImportError` for an unknown name."""
        if name not in self._known:
            self._known[name] = _of_the_package(name, self._known)
        return self._known[name]

    def create(self, name_or_config: str | Mapping[str, JSON], **defaults: JSON) -> RewardFunction:
        """Return a reward function: by its name, or by a mapping with `type` and settings, which may be in `params`."""
        if isinstance(name_or_config, str):
            kind, settings = name_or_config, dict(defaults)
        else:
            given = dict(name_or_config)
            kind = given.pop("type")
            params = given.pop("params", {})
            settings = {**defaults, **given, **params}
        found: Callable[..., Any] = self.get(kind)
        if not isinstance(found, type):
            return LegacyFunctionWrapper(found, **settings)
        made: RewardFunction = found(**settings)
        return made

    def list_registered(self) -> list[str]:
        return list(self._known)

    def load_required_functions(self, config: Any) -> set[str]:
        """Load the reward functions that a configuration names. Returns the names."""
        names = set(_named_in(config))
        for name in names:
            self.get(name)
        return names


def _named_in(config: Any) -> Iterator[str]:
    for dataset in getattr(config, "datasets", None) or ():
        for field in ("dataset_reward_funcs", "reward_funcs"):
            yield from getattr(dataset, field, None) or ()
        for kind in getattr(dataset, "types", None) or ():
            yield from kind.get("reward_funcs", ())
    for field in ("reward_functions", "reward_funcs"):
        for each in getattr(config, field, None) or ():
            if isinstance(each, str):
                yield each
            elif isinstance(each, Mapping) and "type" in each:
                yield each["type"]


def _of_the_package(name: str, known: Mapping[str, Any]) -> Any:
    """Return the reward function of a name that nobody registered: ours under its longer name, or the one of the
    package atroposlib if it is installed."""
    short = name.removesuffix("_reward")
    if short in known:
        return known[short]
    for module in (f"{short}_reward", short):
        try:
            found = importlib.import_module(f"atroposlib.envs.reward_fns.{module}")
        except ImportError:
            continue
        for kind in vars(found).values():
            if inspect.isclass(kind) and kind.__module__ == found.__name__ and hasattr(kind, "compute"):
                return kind
    raise ImportError(
        f"no reward function is named {name!r}: register it with @registry.register, or install atroposlib, whose "
        f"reward functions are used then; registered: {', '.join(sorted(known))}"
    )


registry = RewardRegistry()
"""The registry that environments share."""


@registry.register
class CombinedReward(RewardFunction):
    """The sum of several reward functions, without their weights. `normalization` is `none`, `sum` (divide by the sum
    of the weights) or `minmax` (scale to 0 to 1). A part that raises an error is left out, and the error is logged."""

    def __init__(
        self,
        rewards: Sequence[str | Mapping[str, JSON]],
        normalization: str = "none",
        weight: float = 1.0,
        **config: JSON,
    ) -> None:
        super().__init__(weight=weight, **config)
        self.normalization = normalization
        self.reward_functions = [registry.create(each) for each in rewards]

    @property
    def name(self) -> str:
        return f"combined({','.join(each.name for each in self.reward_functions)})"

    def set_wandb_logger(self, logger: Any) -> None:
        super().set_wandb_logger(logger)
        for each in self.reward_functions:
            each.set_wandb_logger(logger)

    def compute(self, completions: Sequence[JSON], **context: JSON) -> list[float]:
        if not completions:
            return []
        total = [0.0] * len(completions)
        for each in self.reward_functions:
            try:
                total = [
                    before + score for before, score in zip(total, each.compute(completions, **context), strict=True)
                ]
            except Exception:
                logger.exception("the reward function %s failed; it is left out of the sum", each.name)
        weights = sum(each.weight for each in self.reward_functions)
        lowest, highest = min(total), max(total)
        if self.normalization == "sum" and weights > 0:
            return [score / weights for score in total]
        if self.normalization == "minmax" and highest > lowest:
            return [(score - lowest) / (highest - lowest) for score in total]
        return total


@registry.register
class FormatReward(RewardFunction):
    """1.0 for a completion with one of the tags (all of them with `require_all_tags`) around any text, otherwise 0.0.
    By default the tags are `think` and `answer`."""

    def __init__(
        self,
        preferred_tags: Sequence[str] | None = None,
        require_all_tags: bool = False,
        case_sensitive: bool = False,
        weight: float = 1.0,
        **config: JSON,
    ) -> None:
        super().__init__(weight=weight, **config)
        self.preferred_tags = list(preferred_tags or ("think", "answer"))
        self.require_all_tags = require_all_tags
        self.case_sensitive = case_sensitive

    def compute(self, completions: Sequence[JSON], **context: JSON) -> list[float]:
        plain = str if self.case_sensitive else str.lower
        enough, tags = (all if self.require_all_tags else any), list(map(plain, self.preferred_tags))
        return [
            1.0 if enough(f"</{tag}>" in text.partition(f"<{tag}>")[2] for tag in tags) else 0.0
            for text in (plain(self.get_content(each)) for each in completions)
        ]
