"""Tokenizers for token-exact chat, among them the fast one that most models ship as `tokenizer.json`.

By default, text is encoded and decoded without added or omitted tokens. A local tokenizer needs no network. A name that
does not look like a path is taken as a model on the hub, whose tokenizer files are fetched unless they are cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from palaestra_slots.core.config import cache_folder, local_path
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.io import plugins
from palaestra_slots.core.types import JSON

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""The files of a model's folder that are read; only the first is required."""

MODELS = "palaestra.models"
"""The group of entry points whose names are models that `palaestra model get` puts on this machine."""

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer(Protocol):
    """Anything that encodes and decodes, such as the tokenizers of `transformers`. Optional attributes:
    `chat_template`, `special` or `bos_token` and the like, `stop_ids` or `eos_token_id`, `special_ids` or
    `all_special_ids`, and `__len__` (the number of ids)."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Sequence[int]:
        """Return the token ids of the text. Special tokens in the text get their own ids."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids; incomplete bytes become replacement characters."""
        ...


class FastTokenizer:
    """A `tokenizer.json` with the other files of its folder. Needs the extra `tokens`. `special` maps names
    (`bos_token`, …) to the tokens' texts. `stop_ids` end a turn. `added_ids` are the ids of tokens added to the
    vocabulary: the text of such a token is always encoded as this one id. `special_ids` are those of control tokens."""

    def __init__(
        self,
        tokenizer: RustTokenizer,
        *,
        chat_template: str | None = None,
        special: Mapping[str, str] | None = None,
        stop_ids: Sequence[int] = (),
        source: str = "",
    ) -> None:
        # A `tokenizer.json` may keep the limits of its training, which would silently cut long prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = self.backend_tokenizer = tokenizer
        self.chat_template = chat_template
        self.special = dict(special or {})
        self.source = source
        own = tokenizer.token_to_id(self.special["eos_token"]) if "eos_token" in self.special else None
        added = tokenizer.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self.stop_ids = tuple(dict.fromkeys([*stop_ids, *([] if own is None else [own])]))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of the text. Lone surrogates, which tool output can hold, become question marks."""
        try:
            return self._encoded(text, add_special_tokens)
        except TypeError:  # the library's error for text that UTF-8 cannot encode
            return self._encoded(text.encode(errors="replace").decode(), add_special_tokens)

    def _encoded(self, text: str, add_special_tokens: bool) -> list[int]:
        # Encoding is most of the cost of a turn, so this uses the method that does not compute the tokens' positions.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def id_to_token(self, number: int) -> str | None:
        """Return the token of an id in the vocabulary's own spelling, or None."""
        found: str | None = self._tokenizer.id_to_token(number)
        return found

    def save(self, path: Path) -> None:
        self._tokenizer.save(str(path))

    def __len__(self) -> int:
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return size


def named_folder(name: str) -> Path:
    """Return the folder of a model of the group `MODELS`, or the link to it, whether it exists or not."""
    return cache_folder("models") / name


def model_source(name: str) -> str:
    """Return the folder of a model that `palaestra model get` knows by this name. Other names and paths are returned as
    they are. Raises `ConfigError` if the model is not on this machine."""
    if "/" in name or name not in plugins.installed(MODELS) or Path(name).is_dir():
        return name
    folder = named_folder(name)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"The model '{name}' is not on this machine yet: `palaestra model get {name}` gets it.")
    return str(folder)


def load_tokenizer(name: str) -> FastTokenizer:
    """Return a tokenizer. `name` is a folder, a `tokenizer.json` file or a model on the hub, whose files may be
    downloaded. The call blocks. Raises `ConfigError` if the tokenizer cannot be loaded, or if the extra `tokens` is
    missing."""
    if name in ("", "none", "default"):
        raise ConfigError("No tokenizer was named: set --openai.tokenizer_name to a model's folder or name.")
    name = model_source(name)
    path = local_path(name)
    if path.is_dir():
        return _from_files(name, lambda file: path / file if (path / file).is_file() else None)
    if path.is_file():
        return _from_files(name, lambda file: path if file == "tokenizer.json" else _beside(path, file))
    # A name on the hub has at most one slash. A mistyped path must not be looked up there.
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or ("/" in name and path.parent.is_dir()):
        raise no_folder(path)
    return _from_files(name, lambda file: _fetched(name, file))


def no_folder(path: Path) -> ConfigError:
    """Return the error for a missing model folder."""
    return ConfigError(
        f"There is no model folder {path}. `palaestra model tiny {path}` makes a small one, and `palaestra model get "
        "smollm2` gets a trained one; name a model on the hub as OWNER/NAME."
    )


def _beside(path: Path, file: str) -> Path | None:
    return path.parent / file if (path.parent / file).is_file() else None


def _fetched(name: str, file: str) -> Path | None:
    """Return one file of a model's repository, from the local cache or the hub, or None if the repository has no such
    file."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError:
        raise _missing_extra() from None
    try:
        return Path(hf_hub_download(name, file))
    except Exception as error:  # all errors of the hub's client: no such model, no network, no permission
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return None  # `LocalEntryNotFoundError` means that the hub could not be reached
        raise ConfigError(
            f"Tokenizer '{name}' is not a local folder and could not be fetched ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}). Set --openai.tokenizer_name to a local folder."
        ) from None


def _missing_extra() -> ConfigError:
    return ConfigError(
        f"Token-exact servers need the extra 'tokenizers': {install_command('tokenizers', 'palaestra-tokens')}"
    )


def _from_files(source: str, find: Callable[[str], Path | None]) -> FastTokenizer:
    try:
        from tokenizers import Tokenizer as RustTokenizer
    except ImportError:
        raise _missing_extra() from None
    main = find("tokenizer.json")
    if main is None:
        raise ConfigError(
            f"'{source}' has no tokenizer.json. Save the model's tokenizer in the fast format: "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )
    try:
        tokenizer = RustTokenizer.from_file(str(main))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{main} is not a tokenizer: {error}") from None
    config, generation = _json(find("tokenizer_config.json")), _json(find("generation_config.json"))
    stops = generation.get("eos_token_id", [])
    return FastTokenizer(
        tokenizer,
        chat_template=_template(find, config),
        special={name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name)))},
        # generation_config.json lists all tokens that end a turn; tokenizer_config.json names only one.
        stop_ids=[stop for stop in (stops if isinstance(stops, list) else [stops]) if type(stop) is int],
        source=source,
    )


def _template(find: Callable[[str], Path | None], config: Mapping[str, JSON]) -> str | None:
    """Return the chat template from its own file or from the tokenizer's config, or None if there is none. Of several
    named templates, `tool_use` is preferred to `default`."""
    if (file := find("chat_template.jinja")) is not None:
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template") or _json(find("chat_template.json")).get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("tool_use") or named.get("default")
    return found if isinstance(found, str) else None


def _token_text(value: JSON) -> str | None:
    """Return a token's text, which the config holds as a string or in an object, or None if it holds neither."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _json(path: Path | None) -> dict[str, JSON]:
    if path is None:
        return {}
    try:
        value = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    return value if isinstance(value, dict) else {}
