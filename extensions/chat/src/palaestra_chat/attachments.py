"""Attaches what a message names: files with `@file`, web pages and images on the web with `@https://…`, and images
also by their path alone.

Text is appended to the message's text; images become image parts of the chat completions API
(https://platform.openai.com/docs/guides/images-vision), recognised by their content. Only the person names what to
attach: text of others, such as piped input or a command of the project, attaches nothing. Pages are fetched as the web
tools do, so private networks are out of reach unless `web_allow` lists them.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from palaestra.tools.net.host_policy import AddressPolicy
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.types import JSON, Message
from palaestra_toolsets.tools.vision import Image, image_type
from palaestra_toolsets.web.fetch import MAX_BYTES, PageUnreadable, fetch
from palaestra_toolsets.web.page_text import HTML, as_text

MAX_TEXT_BYTES, MAX_IMAGE_BYTES = 256 << 10, 20 << 20
MAX_PAGES, MAX_PAGE_CHARS = 5, 100_000
NO_IMAGE = "[The user attached an image here, which this model server does not accept.]"
_NAMED = re.compile(r"(?:^|(?<=[\s\"'(\[]))@(?:\"([^\"]+)\"|((?:\\ |\S)+))")
_PUNCTUATION = ".,;:!?'\""
_ADDRESS = re.compile(r"https?://", re.IGNORECASE)
_IMAGE_PATH = re.compile(
    r"""(["'])([^"'\n]+?\.(?:png|jpe?g|gif|webp))\1"""
    r"""|(?<![^\s"'`(\[])((?:\\ |[^\s"'`(\[])+\.(?:png|jpe?g|gif|webp))(?=$|[\s"'`)\],.;:!?])""",
    re.IGNORECASE,
)
"""A path that ends as one of an image: in quotes, or a word, in which a terminal may have escaped spaces."""

_IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".gif", ".webp"})


def named_files(text: str) -> list[Path]:
    """Return the existing files that a text names with `@name`, and the images that it names by their path."""
    named = [path for path in _named_paths(text) if path.is_file()]
    return list(dict.fromkeys([*named, *(path for path in _image_paths(text) if _is_image_file(path))]))


def _image_paths(text: str) -> Iterator[Path]:
    for match in _IMAGE_PATH.finditer(text):
        path = match[2] or match[3].replace("\\ ", " ")
        if not path.startswith("@"):
            yield _expanded_path(path.removeprefix("file://"))


def _is_image_file(path: Path) -> bool:
    """Return whether there is an image of a size that can be attached."""
    try:
        with open(path, "rb") as file:
            return image_type(file.read(64)) is not None and path.stat().st_size <= MAX_IMAGE_BYTES
    except (OSError, ValueError):
        return False


def missing_files(text: str) -> list[Path]:
    """Return the paths that a text names with `@name` and that look like files (they have a suffix or a folder),
    although no such file exists."""
    return [path for path in _named_paths(text) if not path.is_file() and (path.suffix or len(path.parts) > 1)]


def named_pages(text: str) -> list[str]:
    """Return the addresses that a text names with `@https://…` or `@http://…`, without punctuation at the end."""
    names = [match[1] or _without_end(match[2]) for match in _NAMED.finditer(text)]
    return list(dict.fromkeys(name for name in names if _ADDRESS.match(name)))


def _named_paths(text: str) -> list[Path]:
    named: list[Path] = []
    for exact, bare in _NAMED.findall(text):
        if _ADDRESS.match(exact or bare):
            continue
        path = _expanded_path(exact or bare.replace("\\ ", " "))
        if not exact and not path.is_file():  # the sentence may go on behind the name, or end there
            path = _expanded_path(_without_end(bare).replace("\\ ", " "))
        named.append(path)
    return list(dict.fromkeys(named))


def _without_end(name: str) -> str:
    """Return a name in a sentence without the punctuation at its end, and without a bracket that it did not open."""
    bare = name.rstrip(_PUNCTUATION)
    if bare.endswith((")", "]")) and not {"(", "["} & {*bare}:
        return _without_end(bare[:-1])
    return bare


def _expanded_path(name: str) -> Path:
    """Return the path of this name. The home directory of a user who does not exist stays as it is written."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def with_files(text: str, *, piped: str = "") -> JSON:
    """Return the content of a message: `text`, and the files that it names. `piped` is added to the text.
    File names in `piped` attach no files, because someone other than the user may have written it. Raises `ConfigError`
    for a file that cannot be sent."""
    parts: list[JSON] = []
    named = named_files(text)
    text = "\n\n".join(part for part in (text, piped) if part)
    for path in named:
        data = _read_attachment(path)
        if (kind := image_type(data)) is not None:
            parts.append(image_part(data, kind))
        elif path.suffix.lower() in _IMAGE_SUFFIXES:
            raise ConfigError(f"{path} is not a PNG, JPEG, GIF or WebP image, although its name says so")
        elif b"\0" in data:
            raise ConfigError(f"{path} is neither text nor an image; put it into the shared folder (--workdir)")
        else:
            text += f'\n\n<file name="{path}">\n{data.decode(errors="replace")}\n</file>'
    return [{"type": "text", "text": text}, *parts] if parts else text


def _read_attachment(path: Path) -> bytes:
    """Return the content of a file. Raises `ConfigError` if it is too large for its type."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    limit = MAX_TEXT_BYTES if image_type(data) is None else MAX_IMAGE_BYTES
    if len(data) > limit:
        raise ConfigError(
            f"{path} has {path.stat().st_size} bytes; an attached file of its type can have at most {limit}"
        )
    return data


def image_part(data: bytes, kind: str) -> JSON:
    """Return an image of this media type as a content part."""
    return {"type": "image_url", "image_url": {"url": Image(data, kind).data_url()}}


def checked_image(data: str) -> JSON:
    """Return an image in base64 as a content part, with the type that its content has. Raises `ConfigError`."""
    if len(data) * 3 // 4 > MAX_IMAGE_BYTES:
        raise ConfigError(f"the image has more than the {MAX_IMAGE_BYTES} bytes that an image may have")
    try:
        image = base64.b64decode(data, validate=True)
    except ValueError:
        raise ConfigError("the image is not valid base64") from None
    if (kind := image_type(image)) is None:
        raise ConfigError("the image is not a PNG, JPEG, GIF or WebP image")
    return image_part(image, kind)


async def with_pages(content: JSON, named: str, allowed: Iterable[str] = ()) -> JSON:
    """Return the content of a message with the pages that the person names in `named`: pages as text, images as images.
    `allowed` has the private addresses that may be fetched. Raises `ConfigError` for a page that cannot be read; then
    nothing is to be sent."""
    addresses = named_pages(named)
    if not addresses:
        return content
    if len(addresses) > MAX_PAGES:
        raise ConfigError(f"the message names {len(addresses)} pages; at most {MAX_PAGES} can be attached")
    policy = AddressPolicy(allowed)
    found = await asyncio.gather(*(_page_or_image(address, policy) for address in addresses))
    return added(content, [each for each in found if isinstance(each, str)], [
        each for each in found if not isinstance(each, str)
    ])  # fmt: skip


def added(content: JSON, texts: Sequence[str], parts: Sequence[JSON]) -> JSON:
    """Return the content of a message with more text and more parts."""
    known: list[JSON] = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    text = "\n\n".join([str(known[0]["text"]), *texts])
    known = [{"type": "text", "text": text}, *known[1:], *parts]
    return known if len(known) > 1 else text


async def _page_or_image(address: str, policy: AddressPolicy) -> JSON:
    """Return a page as text, or an image as a content part."""
    try:
        fetched = await fetch(address, policy, max_bytes=MAX_IMAGE_BYTES)
        if (kind := image_type(fetched.body)) is not None:
            if fetched.cut:
                raise PageUnreadable(f"the image has more than {MAX_IMAGE_BYTES} bytes")
            return image_part(fetched.body, kind)
        if fetched.content_type.lower() in HTML and importlib.util.find_spec("trafilatura") is None:
            raise PageUnreadable(f"reading HTML needs the extra `web` ({install_command('web')})")
        if len(fetched.body) > MAX_BYTES:
            fetched = replace(fetched, body=fetched.body[:MAX_BYTES], cut=True)
        page = await as_text(address, fetched)
    except PageUnreadable as why:
        raise ConfigError(f"{address} cannot be attached: {why}") from None
    text = page.content[:MAX_PAGE_CHARS].replace("</page", "<\\/page")  # so that the page cannot end its own block
    notes = [page.note] if page.note else []
    if len(page.content) > MAX_PAGE_CHARS:
        notes.append(f"only the first {MAX_PAGE_CHARS} of its {len(page.content)} characters are here")
    about = f"[{'; '.join(notes)}]\n" if notes else ""
    title = f"{' '.join(page.title.split())}\n\n".replace("</page", "<\\/page") if page.title else ""
    return f'<page url="{fetched.url}">\n{about}{title}{text}\n</page>'


def has_images(messages: Sequence[Message]) -> bool:
    """Return whether any of the messages has an image."""
    return any(_is_image(part) for message in messages for part in _parts(message))


def images_of(messages: Sequence[Message]) -> list[JSON]:
    """Return the images of the messages."""
    return [part for message in messages for part in _parts(message) if _is_image(part)]


def digest(image: JSON) -> str:
    """Return what identifies the content of an image."""
    return hashlib.sha256(json.dumps(image["image_url"], sort_keys=True).encode()).hexdigest()[:16]


def without_images(messages: Sequence[Message], keeps: Callable[[JSON], bool] = lambda image: False) -> list[Message]:
    """Return the messages with a text in place of each image that `keeps` does not keep, for a model that does not take
    them."""
    return [
        {**message, "content": _without_images(_parts(message), keeps)} if has_images([message]) else message
        for message in messages
    ]


def _without_images(parts: Sequence[JSON], keeps: Callable[[JSON], bool]) -> JSON:
    shown = [{"type": "text", "text": NO_IMAGE} if _is_image(part) and not keeps(part) else part for part in parts]
    if all(isinstance(part, Mapping) and part.get("type") == "text" for part in shown):
        return "\n\n".join(str(part["text"]) for part in shown)
    return shown


def _parts(message: Message) -> Sequence[JSON]:
    content = message.get("content")
    return content if isinstance(content, list) else ()


def _is_image(part: JSON) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image_url"
