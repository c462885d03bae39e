"""The recording endpoint: a model server for external agents, with a URL, a key and a record for each rollout."""

from palaestra.inference.recording.conversations import CallLimits, Conversations, RecordedCalls
from palaestra.inference.recording.endpoint import RecordingEndpoint, RolloutAddress

__all__ = ["CallLimits", "Conversations", "RecordedCalls", "RecordingEndpoint", "RolloutAddress"]
