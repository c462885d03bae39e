"""What can happen to a trajectory server. These are records: they are written to its store as they are. No I/O."""

from __future__ import annotations

import msgspec

from palaestra.trainers.atropos.wire import EnvRegistration, Registration


class Event(msgspec.Struct, tag_field="event", kw_only=True, omit_defaults=True):
    """Something that happened."""


class TrainerRegistered(Event, tag="trainer"):
    registration: Registration


class TrainerStarted(Event, tag="start"):
    """The trainer asked for its first batch: environments may register from here on."""


class EnvRegistered(Event, tag="env"):
    registration: EnvRegistration


class EnvDisconnected(Event, tag="disconnect"):
    env_id: int


class GroupReceived(Event, tag="group", kw_only=True):
    """`group` is the JSON of a checked `ScoredData` without its `delivery_id`; `sequences` is its number of rows."""

    sequences: int
    env_id: int | None = None
    delivery_id: str | None = None
    group: msgspec.Raw


class BatchTaken(Event, tag="batch"):
    """The groups of these serial numbers went to the trainer, in this order."""

    serials: list[int]


class DataReset(Event, tag="reset"):
    """Everything was forgotten."""


AnyEvent = TrainerRegistered | TrainerStarted | EnvRegistered | EnvDisconnected | GroupReceived | BatchTaken | DataReset
