"""Converts a GGUF file to a model folder.

The folder has the weights in float32, the tokenizer, a chat template with tools and the generation settings, so
transformers, vLLM and the trainers here load it. Quantized weights are dequantized.

Needs the extra `gguf` (torch, transformers, gguf). Source of the mapping: the GGUF loader of transformers 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.io.durable_files import new_folder
from palaestra_tokens.engines.torch_decoder import quiet_loading
from palaestra_tokens.templates import TurnRenderer
from palaestra_tokens.templates.jinja import template_of
from palaestra_tokens.testing.tiny_model import chat_template
from palaestra_tokens.tokenizers import load_tokenizer

_TOOL = {
    "type": "function",
    "function": {
        "name": "terminal",
        "description": "Run a shell command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


@dataclass(frozen=True, slots=True)
class ConvertedModel:
    """A model folder. `licence` and `source` are what the file states, or empty. `template` is `own` if the file's chat
    template shows tools, else `chatml`."""

    path: Path
    parameters: int
    vocabulary: int
    licence: str
    source: str
    template: str


def convert(file: Path, out: Path) -> ConvertedModel:
    """Write the folder `out`, which must not exist or be empty. Blocks. Raises `ConfigError` if the extra is missing,
    if the file cannot be converted, or if `out` has files."""
    try:
        import torch
        from gguf import GGUFReader
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    except ImportError as error:
        raise ConfigError(
            f"Converting a GGUF file needs the extra 'gguf' ({error}): {install_command('gguf')}"
        ) from None
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not an empty folder: choose another one, or remove it")
    try:
        stated = GGUFReader(file)
        licence, source = _metadata_text(stated, "general.license"), _source(stated)
        with quiet_loading():
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except Exception as error:  # a file's data may be anything, and the loaders raise their own errors
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{file} cannot be converted: {first}") from None
    config = loaded.config
    # transformers refuses to save a model that was loaded from GGUF, because it counts as quantized.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with quiet_loading():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict())
    # Only the ids: servers would apply sampling settings of this file to requests that set none.
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=end if pad is None else pad
    )
    try:
        with new_folder(out) as part:
            with quiet_loading():
                model.save_pretrained(part)
                tokenizer.save_pretrained(part)
            kind = _with_tools(part)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from None
    return ConvertedModel(out, model.num_parameters(), len(tokenizer), licence, source, kind)


def _with_tools(folder: Path) -> str:
    """Give the model in `folder` the ChatML template with tools, unless its own template shows tools. Raises
    `ConfigError` if neither fits its tokenizer."""
    try:
        _check_tokenizer(folder)
    except ConfigError as error:
        found = load_tokenizer(str(folder))
        if not {"<|im_start|>", "<|im_end|>"} <= {found.decode([number]) for number in found.added_ids}:
            raise ConfigError(
                f"The model's own chat template has no tools ({error}), and its tokenizer has no <|im_start|>, so the "
                "built-in template does not fit either"
            ) from None
        (folder / "chat_template.jinja").write_text(chat_template(), encoding="utf-8")
        _check_tokenizer(folder)
        return "chatml"
    return "own"


def _check_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    TurnRenderer(template_of(tokenizer), tokenizer, tools=[_TOOL], stop_ids=tokenizer.stop_ids)


def _source(stated: Any) -> str:
    """Return where the file says that its weights come from."""
    return (
        _metadata_text(stated, "general.source.url")
        or _metadata_text(stated, "general.base_model.0.repo_url")
        or _metadata_text(stated, "general.name")
    )


def _metadata_text(stated: Any, key: str) -> str:
    """Return a text of the file's metadata as one line that is safe to print, or nothing."""
    field = stated.get_field(key)
    value = field.contents() if field is not None else ""
    return "".join(each for each in value if each.isprintable())[:200] if isinstance(value, str) else ""
