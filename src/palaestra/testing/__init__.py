"""Fakes for tests and experiments: model servers and engines without a model, and a tiny real model.

`LoopbackServer` plays a list of chat completions; `TokenLoopback` speaks the token wires of vLLM and SGLang over any
token engine, for example a `ToyEngine`, which gives texts as a model might; `ModelServer` adds chat. `make_tiny` makes
a small model's folder.
"""

from palaestra.testing.fake_chat_server import FakeAnswer, LoopbackServer, Seen, completion
from palaestra.testing.fake_engine import CHATML, ToyEngine, toy_logprob, toy_tokenizer
from palaestra.testing.fake_token_server import TokenLoopback
from palaestra.testing.model_server import ModelServer, serve_model
from palaestra.testing.tiny_model import TinyModel, make_tiny, save_tokenizer, train_tokenizer

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
    "serve_model",
    "toy_logprob",
    "toy_tokenizer",
    "train_tokenizer",
]
