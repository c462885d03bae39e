"""Chat over token ids, in conversations, with sampling and the reading of replies."""
