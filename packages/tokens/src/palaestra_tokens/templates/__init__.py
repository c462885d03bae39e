"""Chat templates, rendered with the semantics of `transformers`, and the tokens that a new turn adds."""

from palaestra_tokens.templates.jinja import ChatTemplate
from palaestra_tokens.templates.turn_renderer import ChatFormat, History, Opening, TurnRenderer, TurnStep

__all__ = ["ChatFormat", "ChatTemplate", "History", "Opening", "TurnRenderer", "TurnStep"]
