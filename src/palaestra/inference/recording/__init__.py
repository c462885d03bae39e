"""The recording endpoint: a model server for external agents, with a URL, a key and a record for each rollout."""

from palaestra.inference.recording.endpoint import RecordingEndpoint, RolloutAddress
from palaestra.inference.recording.recorded_conversations import CallLimits, Conversations, RecordedCalls

__all__ = ["CallLimits", "Conversations", "RecordedCalls", "RecordingEndpoint", "RolloutAddress"]
