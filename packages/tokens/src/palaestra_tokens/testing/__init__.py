"""Fakes for tests and experiments: model servers and engines without a model, and a tiny real model.

`LoopbackServer` returns given chat completions in turn. `ToyEngine` is a token engine that returns given texts;
`TokenLoopback` and `ModelServer` of `palaestra_tokens.serving` serve it. `make_tiny` writes the folder of a small
model.
"""

from palaestra_tokens.serving.model_server import ModelServer
from palaestra_tokens.serving.token_server import TokenLoopback
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, Seen, completion
from palaestra_tokens.testing.fake_engine import CHATML, ToyEngine, toy_logprob, toy_tokenizer
from palaestra_tokens.testing.tiny_model import TinyModel, make_tiny, save_tokenizer, train_tokenizer

__all__ = [
    "CHATML",
    "FakeAnswer",
    "LoopbackServer",
    "ModelServer",
    "Seen",
    "TinyModel",
    "TokenLoopback",
    "ToyEngine",
    "completion",
    "make_tiny",
    "save_tokenizer",
    "toy_logprob",
    "toy_tokenizer",
    "train_tokenizer",
]
