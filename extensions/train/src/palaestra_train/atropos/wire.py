"""Defines the messages of the trajectory API, and checks that a group is fit to train on. No I/O.

Invariants of a `ScoredData` from `read_scored`: masks, scores and those of log-probabilities, advantages, messages and
overrides that are present have one entry per sequence. An entry of masks or log-probabilities has one value per token,
and an entry of advantages one per token or one for all. Scores, log-probabilities and advantages are finite.

Source of the format: the routes and models of atroposlib 0.4, which does not check lengths. `delivery_id` is
Palaestra's addition: deliveries with the same id contain the same group.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from palaestra_slots.core.types import JSON, Message

T = TypeVar("T")


class RequestRefusal(Exception):
    """A request that the server refuses: HTTP status, reason, and the invalid field.

    `retry_s` is set if the same request may be accepted later.
    """

    def __init__(self, status: int, detail: str, *, field: str | None = None, retry_s: float | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.field = field
        self.retry_s = retry_s


class Registration(msgspec.Struct, kw_only=True):
    """A trainer. `batch_size` is a number of sequences, `max_token_len` the maximum number of tokens in one sequence. A
    negative `num_steps` means no limit."""

    wandb_group: str | None = None
    wandb_project: str | None = None
    batch_size: int
    max_token_len: int
    checkpoint_dir: str = ""
    save_checkpoint_interval: int = -1
    starting_step: int = 0
    num_steps: int = -1


class EnvRegistration(msgspec.Struct, kw_only=True):
    """An environment. `group_size` counts sequences; `min_batch_allocation` is its minimum share of a batch, from 0 to
    1."""

    max_token_length: int
    desired_name: str
    weight: float = 1.0
    group_size: int = 1
    min_batch_allocation: float | None = None


class EnvIdentifier(msgspec.Struct):
    """One registered environment."""

    env_id: int


class Registered(msgspec.Struct):
    """The answer of `POST /register-env`. All fields are set if `status` is "success"."""

    status: str
    env_id: int = -1
    wandb_name: str | None = None
    num_steps: int | None = None
    starting_step: int | None = None


class BatchInfo(msgspec.Struct):
    """The answer of `GET /info`: sequences per batch and tokens per sequence. Both are -1 until a trainer registers."""

    batch_size: int
    max_token_len: int


class EnvStatus(msgspec.Struct, kw_only=True):
    """The answer of `GET /status-env`. Queue sizes count groups of the size that the asking environment registered.

    `starving` is Palaestra's addition: enough sequences for a batch wait, but no combination of the groups fills one.
    """

    current_step: int
    queue_size: int
    unallocated_fraction: float = 1.0
    self_queue_size: int
    max_group_size: int = 1
    starving: bool = False
    env_weight: float


TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class ScoredData(msgspec.Struct, kw_only=True):
    """A group: `tokens[G][T]`, `masks[G][T]` (-100 where nothing is trained), `scores[G]`, and optional fields. These
    include `inference_logprobs[G][T]`, `ref_logprobs[G][T]` and `advantages[G]`, which has T values or one value for
    each sequence. An empty list counts as absent.
    """

    tokens: list[list[TokenId]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[Message]] | None = None
    generation_params: dict[str, JSON] | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[dict[str, JSON]] | None = None
    group_overrides: dict[str, JSON] | None = None
    images: JSON = None
    env_id: int | None = None
    distill_token_ids: JSON = None
    distill_logprobs: JSON = None
    delivery_id: str | None = None


def read(body: bytes, shape: type[T]) -> T:
    """Return the body as a `shape`. Numbers may be strings, as in atroposlib. Raises `RequestRefusal` (422)."""
    try:
        return msgspec.json.decode(body, type=shape, strict=False)
    except msgspec.ValidationError as error:
        place = re.search(r"`\$\.?([^`]*)`$", str(error)) or re.search(r"field `([^`]*)`", str(error))
        raise RequestRefusal(422, str(error), field=place[1] if place else None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefusal(422, f"the body is not JSON: {error}") from None


def read_scored(body: bytes) -> ScoredData:
    """Read and check one group. Raises `RequestRefusal` (422)."""
    return checked(read(body, ScoredData))


def read_scored_list(body: bytes) -> list[ScoredData]:
    """Read and check several groups. Raises `RequestRefusal` (422)."""
    groups = read(body, list[ScoredData])
    for number, group in enumerate(groups):
        try:
            checked(group)
        except RequestRefusal as refusal:
            field = f"[{number}].{refusal.field}"
            raise RequestRefusal(422, f"group {number} of {len(groups)}: {refusal.detail}", field=field) from None
    return groups


def checked(group: ScoredData) -> ScoredData:
    """Return the group if it is valid. Raises `RequestRefusal` (422), which names the invalid field, for example
    one whose lengths differ from those of `tokens`."""
    if not group.tokens:
        raise RequestRefusal(422, "tokens: a group needs at least one sequence", field="tokens")
    _same_count(group, "scores", group.scores)
    _finite("scores", group.scores)
    _same_lengths(group, "masks", group.masks)
    for name, rows in (("inference_logprobs", group.inference_logprobs), ("ref_logprobs", group.ref_logprobs)):
        if rows:
            _same_lengths(group, name, rows)
            _finite(name, *rows)
    if group.advantages:
        _same_lengths(group, "advantages", group.advantages, or_one=True)
        _finite("advantages", *group.advantages)
    for name, values in (("messages", group.messages), ("overrides", group.overrides)):
        if values:
            _same_count(group, name, values)
    for number, messages in enumerate(group.messages or ()):
        if any("role" not in message or "content" not in message for message in messages):
            field = f"messages[{number}]"
            raise RequestRefusal(422, f"{field}: every message needs the keys role and content", field=field)
    return group


def _finite(name: str, *rows: Sequence[float]) -> None:
    """Refuse numbers that are not finite. Numbers may be sent as strings, which can be NaN, and a single NaN would ruin
    the weights."""
    if not all(math.isfinite(sum(row)) for row in rows):
        raise RequestRefusal(422, f"{name}: a value is not a finite number", field=name)


def _same_count(group: ScoredData, name: str, values: Sequence[object]) -> None:
    if len(values) != len(group.tokens):
        raise RequestRefusal(422, f"{name}: {len(values)} entries for {len(group.tokens)} sequences", field=name)


def _same_lengths(group: ScoredData, name: str, rows: Sequence[Sequence[object]], *, or_one: bool = False) -> None:
    _same_count(group, name, rows)
    for number, (row, tokens) in enumerate(zip(rows, group.tokens, strict=True)):
        if len(row) != len(tokens) and not (or_one and len(row) == 1):
            field = f"{name}[{number}]"
            raise RequestRefusal(422, f"{field}: {len(row)} values for {len(tokens)} tokens", field=field)
