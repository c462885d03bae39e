"""`ChatTokenizer`: the tokenizer that environments see, with the methods and defaults of those of `transformers`.

It adds chat templates, calls, and special tokens to any `Tokenizer`. Where releases of `transformers` differ,
it behaves as release 4, for which existing environments were written: `apply_chat_template` returns a list of ids.
Engines use the tokenizer inside, whose `encode` adds no special tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.templates.jinja import NAMED_TOKENS, ChatTemplate, template_of
from palaestra_tokens.tokenizers import Tokenizer

_LAST_WORD = "\ufdd1continued\ufdd1 "
"""Marks where a final message that is continued ends. The space shows whether the template strips messages."""


class TokenizedText(dict[str, JSON]):
    """The answer of a call: `input_ids[T]` and `attention_mask[T]` (for several texts, lists of them), as entries and
    as attributes."""

    def __getattr__(self, name: str) -> JSON:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class ChatTokenizer:
    """`tokenizer` with the interface of `transformers`. Other attributes are those of `tokenizer`; assigned ones, such
    as `pad_token` and `chat_template`, apply only to this object."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.chat_template: str | None = getattr(tokenizer, "chat_template", None)
        self.name_or_path: str = getattr(tokenizer, "source", "")
        self.padding_side = "right"
        special = getattr(tokenizer, "special", None)
        self._special = dict(special) if isinstance(special, Mapping) else {}
        self._compiled: dict[str, ChatTemplate] = {}

    def __getattr__(self, name: str) -> Any:
        """Return a special token (`eos_token`), its id (`eos_token_id`), or an attribute of the tokenizer inside."""
        if name.startswith("__") or "tokenizer" not in self.__dict__:
            raise AttributeError(name)
        if name in NAMED_TOKENS and name in self._special:
            return self._special[name]
        if name.removesuffix("_id") in NAMED_TOKENS and name.endswith("_id"):
            token = getattr(self, name.removesuffix("_id"))
            return None if token is None else self.convert_tokens_to_ids(token)
        try:
            return getattr(self.tokenizer, name)
        except AttributeError:
            if name in NAMED_TOKENS:
                return None
            raise AttributeError(f"the tokenizer has no attribute {name!r}") from None

    def __len__(self) -> int:
        return len(self.tokenizer)  # type: ignore[arg-type]

    # Text and ids

    def encode(self, text: str, add_special_tokens: bool = True, **options: JSON) -> list[int]:
        """Return the ids of the text, by default with the special tokens that the tokenizer puts around a text."""
        ids: list[int] = self(text, add_special_tokens=add_special_tokens, **options)["input_ids"]
        return ids

    def decode(self, token_ids: JSON, skip_special_tokens: bool = False, **_: JSON) -> str:
        """Return the text of one id or of several."""
        if hasattr(token_ids, "tolist"):
            token_ids = token_ids.tolist()
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: JSON, skip_special_tokens: bool = False, **_: JSON) -> list[str]:
        return [self.decode(each, skip_special_tokens) for each in sequences]

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        **_: JSON,
    ) -> TokenizedText:
        """Return the ids and attention mask of a text, or of several. `return_tensors` is `pt` or `np`; then one text
        is a batch of one."""
        texts = [text] if isinstance(text, str) else list(text)
        rows = [list(self.tokenizer.encode(each, add_special_tokens=add_special_tokens)) for each in texts]
        if truncation and max_length is not None:
            rows = [row[:max_length] for row in rows]
        width = max(map(len, rows), default=0)
        if padding == "max_length" and max_length is not None:
            width = max_length
        missing = [width - len(row) if padding else 0 for row in rows]
        filler = self.pad_token_id if self.pad_token_id is not None else self.eos_token_id
        masks = [self._padded([1] * len(row), 0, count) for row, count in zip(rows, missing, strict=True)]
        rows = [self._padded(row, filler, count) for row, count in zip(rows, missing, strict=True)]
        single = isinstance(text, str) and return_tensors is None
        found = {"input_ids": rows, "attention_mask": masks}
        return TokenizedText(
            {name: value[0] if single else _tensor(value, return_tensors) for name, value in found.items()}
        )

    def _padded(self, row: list[int], filler: int, count: int) -> list[int]:
        return [filler] * count + row if self.padding_side == "left" else row + [filler] * count

    def tokenize(self, text: str, add_special_tokens: bool = False, **_: JSON) -> list[str]:
        """Return the tokens of a text in the vocabulary's own spelling."""
        tokens: list[str] = self.convert_ids_to_tokens(self.encode(text, add_special_tokens))
        return tokens

    # Vocabulary

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> JSON:
        find = self.tokenizer.token_to_id  # type: ignore[attr-defined]
        return find(tokens) if isinstance(tokens, str) else [find(each) for each in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int], **_: JSON) -> JSON:
        find = self.tokenizer.id_to_token  # type: ignore[attr-defined]
        return find(ids) if isinstance(ids, int) else [find(each) for each in ids]

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary without the tokens added to it."""
        size: int = self.backend_tokenizer.get_vocab_size(with_added_tokens=False)
        return size

    @property
    def special_tokens_map(self) -> dict[str, str]:
        named = {name: getattr(self, name) for name in NAMED_TOKENS}
        return {name: token for name, token in named.items() if token is not None}

    @property
    def all_special_ids(self) -> list[int]:
        own = [self.convert_tokens_to_ids(token) for token in self.special_tokens_map.values()]
        added = sorted(getattr(self.tokenizer, "special_ids", ()))
        return list(dict.fromkeys(each for each in [*own, *added] if each is not None))

    @property
    def all_special_tokens(self) -> list[str]:
        tokens: list[str] = self.convert_ids_to_tokens(self.all_special_ids)
        return tokens

    # Conversations

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Mapping[str, JSON]] | None = None,
        documents: Sequence[Mapping[str, JSON]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_tensors: str | None = None,
        return_dict: bool = False,
        **variables: JSON,
    ) -> JSON:
        """Return a conversation as ids, as text if `tokenize` is false, or as the answer of a call if `return_dict` is
        true. Other options go to the template. Keys of a message whose value is None are left out. Raises `ConfigError`
        without a chat template, or if the template refuses the conversation."""
        if not conversation:
            raise ConfigError("apply_chat_template needs at least one message")
        call = {name: variables.pop(name) for name in ("padding", "truncation", "max_length") if name in variables}
        call |= variables.pop("tokenizer_kwargs", None) or {}
        messages = [{key: value for key, value in each.items() if value is not None} for each in conversation]
        if continue_final_message:
            messages[-1] = {**messages[-1], "content": f"{messages[-1].get('content', '')}{_LAST_WORD}"}
        text = self._template(chat_template).render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens_map, **variables, **({"documents": documents} if documents else {})},
        )
        if continue_final_message:
            before, _, after = text.rpartition(_LAST_WORD.rstrip())
            text = before if after.startswith(" ") else before.rstrip()
        if not tokenize:
            return text
        done = self(text, add_special_tokens=False, return_tensors=return_tensors, **call)
        return done if return_dict else done["input_ids"]

    def get_chat_template(self, chat_template: str | None = None, tools: JSON = None) -> str:
        return self._template(chat_template).source

    def _template(self, named: str | None) -> ChatTemplate:
        source = named or self.chat_template
        if source is None:
            return template_of(self.tokenizer)
        if source not in self._compiled:
            self._compiled[source] = ChatTemplate(source)
        return self._compiled[source]


def chat_tokenizer(tokenizer: Tokenizer) -> Any:
    """Return a tokenizer with the interface of `transformers`: the same object if it has it already."""
    return tokenizer if hasattr(tokenizer, "apply_chat_template") else ChatTokenizer(tokenizer)


def _tensor(rows: list[list[int]], kind: str | None) -> JSON:
    if kind is None:
        return rows
    if kind == "pt":
        import torch

        return torch.tensor(rows)
    if kind == "np":
        import numpy as np

        return np.array(rows)
    raise ConfigError(f"return_tensors must be pt or np, not {kind!r}")
