"""How to reach a model server: `APIServerConfig`, the contract's fields with the contract's defaults.

Not for agents' settings (temperature, turns): those belong to the environment. Nothing here reads the process
environment; the command line does, and passes values in.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from palaestra.core.config import Settings

ServerType: TypeAlias = Literal["openai", "scripted", "sglang", "transformers", "trl", "vllm"]
"""What speaks at the other end; see `servers.ENGINES` for those that this version has."""


class ServerBaseline(Settings):
    """What all servers of a run have in common."""

    timeout: int = 1200
    """Seconds that one request may take, its retries included, the wait for its turn here not; long
    thinking at low throughput needs many."""

    num_max_requests_at_once: int = 512
    """Requests in flight at one server at most; the rest wait their turn here instead of timing out there."""

    num_requests_for_eval: int = 64
    """Further requests in flight that are kept for evaluation, so that it proceeds while training rollouts run."""

    model_name: str = "default"
    """The model's name at the server; for a scripted server: oracle, noop, patch:FILE or replay:FILE."""

    rolling_buffer_length: int = 1000
    """How many of the latest requests the latency statistics look at."""

    server_type: ServerType = "openai"
    """openai: any server that speaks chat completions. sglang, vllm: token-exact. transformers: token-exact, in this
    process. scripted: a policy that needs no model."""

    tokenizer_name: str = "none"
    """The tokenizer of a token-exact server: a folder, or a model's name; none is that of model_name."""

    tool_parser: str = "hermes"
    """How a token-exact model writes tool calls: the name of a parser; none leaves them in the text."""

    chat_template: str | None = None
    """A file with the chat template of a token-exact model; the tokenizer's own when left out."""

    history: Literal["template", "append"] = "template"
    """When the chat template rewrites history (strips thinking): template begins a new training row, as a server that
    renders every turn anew would; append keeps one row with what was sampled."""


class APIServerConfig(ServerBaseline):
    """One model server."""

    api_key: str | None = None
    """Sent as a bearer token; leave out for servers that ask for none."""

    base_url: str | None = None
    """Where the server listens, for example http://127.0.0.1:8000/v1; the /v1 may be left out."""

    n_kwarg_is_ignored: bool = False
    """The server gives one choice whatever `n` says: ask it n times instead."""

    stream: bool = False
    """Ask for replies in pieces: for servers and proxies that give up on a connection that is silent for long."""

    health_check: bool = True
    """Look once at the start whether the server answers; costs no tokens."""

    replay_file: str | None = None
    """With model name `replay`: the JSONL file of recorded trajectories to play."""
