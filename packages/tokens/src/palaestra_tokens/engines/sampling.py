"""Sampling settings with OpenAI's and vLLM's names: their neutral values, and those that the engines without a server
read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from palaestra_slots.core.errors import EngineRefused
from palaestra_slots.core.types import JSON

NEUTRAL: Mapping[str, JSON] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""The values with which a server samples from the model's own distribution. They are sent with every request that does
not set them, because a server takes a missing one from the model's `generation_config.json` (vLLM) or from its options
(`--override-generation-config` of vLLM, `--preferred-sampling-params` of SGLang).

Sources: `ModelConfig.get_diff_sampling_param` of vLLM, `SamplingParams` of SGLang."""

_IGNORED = frozenset({"n", "logprobs", "top_logprobs", "user", "return_token_ids", "split"})
"""Settings that clients send but that have no effect here: log-probabilities and ids are always returned, and one batch
serves all requests."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings. If `max_tokens` is None, the limit is the model's window. If `temperature` is 0, the likeliest
    token is chosen. If `processed_logprobs` is true, the log-probabilities are those after temperature, `top_k` and
    `top_p`, otherwise the model's own."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()
    processed_logprobs: bool = False

    @classmethod
    def read(cls, settings: Mapping[str, JSON], stop_ids: Collection[int] = ()) -> Sampling:
        """Read settings with OpenAI's and vLLM's names. `stop_ids` are the model's own stop tokens, which `ignore_eos`
        turns off. Raises `EngineRefused` for an invalid setting, or for an unknown one whose value is not 0 or
        empty."""
        left = {name: value for name, value in settings.items() if value is not None and name not in _IGNORED}
        own = () if left.pop("ignore_eos", False) else stop_ids
        max_tokens = left.pop("max_completion_tokens", None) or left.pop("max_tokens", None)
        # If a request has both names, the second one is still there and would count as unknown below.
        left.pop("max_tokens", None)
        mode = left.pop("logprobs_mode", "raw_logprobs")
        if mode not in ("raw_logprobs", "processed_logprobs"):
            raise _invalid_setting("logprobs_mode", mode, "raw_logprobs or processed_logprobs")
        read = cls(
            max_tokens=max_tokens,
            temperature=_number_in_range("temperature", left.pop("temperature", 1.0), 0.0, 100.0),
            top_p=_number_in_range("top_p", left.pop("top_p", 1.0), 1e-6, 1.0),
            top_k=max(0, int(_number_in_range("top_k", left.pop("top_k", 0), -1, 1e9))),
            seed=left.pop("seed", None),
            stop_ids=frozenset(own) | frozenset(left.pop("stop_token_ids", ())),
            processed_logprobs=mode == "processed_logprobs",
        )
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise _invalid_setting("max_tokens", max_tokens, "a positive integer")
        if read.seed is not None and type(read.seed) is not int:
            raise _invalid_setting("seed", read.seed, "an integer")
        # Clients also send settings that this engine lacks with the values that turn them off, which changes nothing.
        idle = [name for name, value in left.items() if value not in (0, 0.0, False, [], {}, "", NEUTRAL.get(name, 0))]
        if idle:
            raise EngineRefused(
                f"This engine has no sampling setting '{idle[0]}'. It supports max_tokens, temperature, top_p, top_k, "
                "seed, stop_token_ids, ignore_eos and logprobs_mode; remove other settings from extra_body."
            )
        return read

    def seeded(self, seed: int) -> Sampling:
        return replace(self, seed=seed)


def _number_in_range(name: str, value: JSON, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise _invalid_setting(name, value, f"a number from {least:g} to {most:g}")
    return value


def _invalid_setting(name: str, value: JSON, wanted: str) -> EngineRefused:
    return EngineRefused(f"The sampling setting {name}={value!r} is not {wanted}.")
