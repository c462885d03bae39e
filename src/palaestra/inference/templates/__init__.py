"""Chat templates, rendered with the semantics of `transformers`, and the tokens that a new turn adds."""

from palaestra.inference.templates.chat_format import ChatFormat
from palaestra.inference.templates.jinja import ChatTemplate
from palaestra.inference.templates.turn_renderer import History, Opening, Step, TurnRenderer

__all__ = ["ChatFormat", "ChatTemplate", "History", "Opening", "Step", "TurnRenderer"]
