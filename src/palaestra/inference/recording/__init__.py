"""The recording endpoint: a model server for agents that others wrote, with a URL, a key and a record per rollout."""

from palaestra.inference.recording.conversations import CallLimits, Conversations, RecordedCalls
from palaestra.inference.recording.endpoint import RecordingEndpoint, RolloutAddress

__all__ = ["CallLimits", "Conversations", "RecordedCalls", "RecordingEndpoint", "RolloutAddress"]
