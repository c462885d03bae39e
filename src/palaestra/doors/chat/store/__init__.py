"""The stored conversations of one user: `ConversationStore`, and the records that it returns."""

from palaestra.doors.chat.store.conversation_store import ConversationRecord, ConversationStore
from palaestra.doors.chat.store.effects import Effect
from palaestra.doors.chat.store.stored_turns import HistoryEntry, StoredTurn, shortened

__all__ = ["ConversationRecord", "ConversationStore", "Effect", "HistoryEntry", "StoredTurn", "shortened"]
