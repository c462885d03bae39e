"""Putting a question about an image to a model: any server with chat completions that take images.

The wire is OpenAI's: one user message with a text part and an `image_url` part that holds a data URL, so the server
fetches nothing itself (https://platform.openai.com/docs/guides/images-vision).

Invariant: the model that is asked is the configuration's, never the calling model's choice.
"""

from __future__ import annotations

from palaestra.core.errors import ToolUnavailable
from palaestra.core.types import JSON
from palaestra.tools.net.json_client import Server
from palaestra.tools.settings import ToolSettings
from palaestra.tools.tool import ToolMistake
from palaestra.tools.vision.image_format import Image


def vision_problem(settings: ToolSettings) -> str | None:
    """Why no image can be looked at, with the way out; None where one can."""
    if settings.vision_base_url is None:
        return (
            "no model that looks at images is configured: set vision_base_url (--env.vision_base_url "
            "http://HOST/v1), vision_model and, where it asks for one, vision_api_key"
        )
    return None


async def look(settings: ToolSettings, image: Image, question: str) -> dict[str, JSON]:
    """What the model says: `analysis` and `usage`. Raises `ToolMistake`, or `ToolUnavailable` where it cannot say."""
    if (reason := vision_problem(settings)) is not None:
        raise ToolMistake(reason)
    base_url = (settings.vision_base_url or "").rstrip("/")
    server = Server(
        "the model that looks at images",
        base_url if base_url.endswith("/v1") else f"{base_url}/v1",
        "vision_api_key",
        {"Authorization": f"Bearer {settings.vision_api_key}"} if settings.vision_api_key else {},
        settings.lane(),
        try_timeout_s=settings.vision_timeout_s,
    )
    content: list[JSON] = [
        {"type": "text", "text": question},
        {"type": "image_url", "image_url": {"url": image.data_url()}},
    ]
    request = {
        "model": settings.vision_model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": settings.vision_max_tokens,
    }
    return _answer(server, await server.post("chat/completions", request))


def _answer(server: Server, told: JSON) -> dict[str, JSON]:
    try:
        choice = told["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
    except (LookupError, TypeError, AttributeError):
        raise server.malformed(told) from None
    if not isinstance(text, str) or not text.strip():
        raise ToolUnavailable(f"the model that looks at images said nothing (finish_reason {reason!r})")
    answer: dict[str, JSON] = {"analysis": text}
    if reason == "length":
        answer["cut"] = "the answer ended at its limit of tokens"
    if isinstance(told.get("usage"), dict):
        answer["usage"] = {name: value for name, value in told["usage"].items() if isinstance(value, int)}
    return answer
