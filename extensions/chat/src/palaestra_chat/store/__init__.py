"""The stored conversations of one user: `ConversationStore`, and the records that it returns."""

from palaestra_chat.store.conversation_store import ConversationRecord, ConversationStore
from palaestra_chat.store.effects import Effect
from palaestra_chat.store.stored_turns import HistoryEntry, StoredTurn, shortened

__all__ = ["ConversationRecord", "ConversationStore", "Effect", "HistoryEntry", "StoredTurn", "shortened"]
