"""How one model's conversations are written: its tokenizer and its template, and a renderer for each set of tools.

Not for the tokens of a rollout. Invariant: a set of tools is looked at once, however many rollouts use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from palaestra.core.types import JSON
from palaestra.inference.templates.jinja import template_of
from palaestra.inference.templates.turn_renderer import TurnRenderer
from palaestra.inference.tokenizers import Tokenizer

_KEPT_RENDERERS = 64


class ChatFormat:
    """A tokenizer with a chat template: its own, or the text given. `stop_ids` adds to the tokens that end a turn.

    Raises `ConfigError` when there is no template or it cannot be read.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None = None, stop_ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._template = template_of(tokenizer, chat_template)
        self._stop_ids = tuple(stop_ids)
        self._renderers: list[TurnRenderer] = []

    def renderer(
        self, tools: Sequence[Mapping[str, JSON]] = (), variables: Mapping[str, JSON] | None = None
    ) -> TurnRenderer:
        """The renderer for these tools and template variables (`enable_thinking`, …). Raises `ConfigError`."""
        wanted_tools, wanted_variables = list(tools), dict(variables or {})
        for renderer in reversed(self._renderers):
            if renderer.tools == wanted_tools and renderer.variables == wanted_variables:
                return renderer
        renderer = TurnRenderer(
            self._template, self.tokenizer, tools=wanted_tools, variables=wanted_variables, stop_ids=self._stop_ids
        )
        self._renderers = [*self._renderers[-_KEPT_RENDERERS + 1 :], renderer]
        return renderer
