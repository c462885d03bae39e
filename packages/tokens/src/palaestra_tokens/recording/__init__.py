"""The recording endpoint: a model server for external agents, with a URL, a key and a record for each rollout."""

from palaestra_tokens.recording.endpoint import RecordingEndpoint, RolloutAddress
from palaestra_tokens.recording.recorded_conversations import CallLimits, Conversations, RecordedCalls

__all__ = ["CallLimits", "Conversations", "RecordedCalls", "RecordingEndpoint", "RolloutAddress"]
