"""Thinking that a model server leaves in the content: servers without a reasoning parser send `<think>…</think>` and
then the answer. A conversation shows and stores the two apart.

Only text at the beginning of a reply is thinking, so an answer may speak of the tags. Rollouts keep the content as it
was sent, because rewards may look for the tags. The tags are those of the chat templates of DeepSeek and Qwen
(`<think>`), Mistral (`[THINK]`), Seed (`<seed:think>`) and of models that were asked in prose to think.
"""

from __future__ import annotations

from palaestra_tokens.engine import ChatCompletion

_TAGS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
}


class ThoughtSplitter:
    """Splits one reply, piece by piece."""

    def __init__(self) -> None:
        self._held = ""
        self._end = ""
        self._thought = False
        self._answers = False

    def take(self, text: str) -> tuple[str, str]:
        """Return the next piece of thinking and the next piece of the answer. Text that may be the beginning of a tag
        is held back."""
        held, self._held = self._held + text, ""
        if not self._answers and not self._end:
            start = held.lstrip()
            opening = next((tag for tag in _TAGS if start.startswith(tag)), "")
            if not opening and any(tag.startswith(start) for tag in _TAGS):
                self._held = held
                return "", ""
            self._answers = not opening
            self._end, held = (_TAGS[opening], start[len(opening) :]) if opening else ("", held)
        if self._answers:
            if self._thought:  # the lines between the thinking and the answer
                held = held.lstrip()
                self._thought = not held
            return "", held
        inner, found, rest = held.partition(self._end)
        if found:
            self._thought = self._answers = True
            return inner, self.take(rest)[1]
        kept = next(size for size in range(len(self._end) - 1, -1, -1) if inner.endswith(self._end[:size]))
        self._held = inner[len(inner) - kept :]
        return inner[: len(inner) - kept], ""


def without_thoughts(completion: ChatCompletion) -> None:
    """Move the thinking at the beginning of each reply from its content to `reasoning_content`, unless the server did
    that. A reply whose opening tag is in the prompt begins with thinking that ends at a tag on a line of its own."""
    for choice in completion.choices:
        message = choice.message
        if not message.content or message.reasoning_content or message.reasoning or message.reasoning_details:
            continue
        splitter = ThoughtSplitter()
        thought, answer = splitter.take(message.content)
        before, ended, after = message.content.partition("\n</think>\n")
        if ended and not thought and "<think>" not in before:
            thought, answer = before, after.lstrip()
        if thought:
            message.reasoning_content, message.content = thought.strip(), answer
