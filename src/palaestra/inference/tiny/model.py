"""Makes the tiny model's folder: Qwen3 architecture, seeded random weights, tokenizer, chat template.

Not a model that knows anything: it is a real one to everything that loads, samples and trains. With `practice` steps it
learns to write well-formed tool calls (`practice.py`), so that conversations with tools come about. Invariant: the same
seed, sizes and library versions give the same weights; nothing is downloaded.

Extra: `train` (torch, transformers).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from palaestra.core.errors import ConfigError
from palaestra.inference.engines.torch_decoder import quiet_loading
from palaestra.inference.tiny.tokens import END_OF_TEXT, TURN_END, save_tokenizer, train_tokenizer

CONTEXT_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class TinyModel:
    """What was made and where. `practice_loss` is the last step's, in nats per token; None without practice."""

    path: Path
    parameters: int
    vocabulary: int
    practice_loss: float | None = None


def make_tiny(
    out: Path, *, seed: int = 0, hidden: int = 128, layers: int = 3, practice: int = 0, force: bool = False
) -> TinyModel:
    """Make the folder `out`. `practice` is in training steps of some hundredths of a second each.

    Raises `ConfigError` when the extra is missing, a size cannot work, or `out` holds something and not `force`.
    """
    try:
        import torch
        from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    except ImportError as error:
        raise ConfigError(
            f"Making a model needs the extra 'train' ({error}): pip install 'palaestra[train]'."
        ) from None
    if hidden < 32 or hidden % 32 or not 1 <= layers <= 64:
        raise ConfigError(f"A model of hidden size {hidden} with {layers} layers: give a multiple of 32, and 1 to 64.")
    _claim(out, force)
    tokenizer = train_tokenizer()
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random state is left alone
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        loss = None
        if practice:
            from palaestra.inference.tiny.practice import practise

            loss = practise(model, tokenizer, steps=practice, seed=seed)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)],
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
        do_sample=True,
        temperature=1.0,
    )
    with quiet_loading():
        model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    save_tokenizer(tokenizer, out)
    parameters = sum(weight.numel() for weight in model.parameters())
    return TinyModel(out, parameters, config.vocab_size, loss)


def _claim(out: Path, force: bool) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        taken = any(out.iterdir())
    except OSError as error:
        raise ConfigError(f"Cannot make the folder {out}: {error.strerror}.") from None
    if taken and not force:
        raise ConfigError(f"{out} is not empty: name a new folder, or overwrite it with --force.")
