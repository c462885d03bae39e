"""The settings of a model server: `APIServerConfig`, whose fields and defaults existing scripts rely on. The agent's
settings (temperature, turns) belong to the environment."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

from palaestra_slots.core.config import Settings, host_path, setting

ServerType: TypeAlias = Literal["openai", "scripted", "sglang", "transformers", "trl", "vllm"]
"""The kind of server; `server_group.ENGINES` lists those that this version supports."""


class ServerBaseline(Settings):
    """Settings that all servers of a run share."""

    ignores_unknown: ClassVar[bool] = True

    timeout: int = setting(
        1200,
        "Time limit of one request in seconds, including its retries but not its wait in the client. Long "
        "thinking at low throughput needs a high limit.",
    )
    num_max_requests_at_once: int = setting(
        512,
        "Maximum requests in flight at one server; further requests wait in the client, where they cannot time out.",
    )
    num_requests_for_eval: int = setting(
        64,
        "Additional requests in flight that are reserved for evaluation, so that it proceeds while training "
        "rollouts run.",
    )
    model_name: str = host_path(
        "default",
        "The model's name at the server; for transformers, a folder or a model on the hub; for scripted, oracle, noop, "
        "patch:FILE or replay:FILE.",
    )
    server_type: ServerType = setting(
        "openai",
        "openai: any server that supports chat completions. sglang, vllm: a token-exact server. transformers: a "
        "token-exact model in this process. scripted: a policy that needs no model.",
        json_schema_extra={"not_offered": ["trl"]},
    )
    tokenizer_name: str = host_path(
        "none",
        "The tokenizer of a token-exact server: a folder or a model's name; none means the tokenizer of model_name.",
    )
    tool_parser: str = setting(
        "hermes",
        "The name of the parser for a token-exact model's tool calls; none leaves calls in the text.",
    )
    chat_template: str | None = host_path(
        None,
        "A file with the chat template of a token-exact model. Default: the tokenizer's own.",
    )
    history: Literal["template", "append"] = setting(
        "template",
        "What to do when the chat template rewrites history, for example by stripping thinking. template: send the "
        "rewritten history and begin a new training row. append: keep the sampled tokens in one row.",
    )


class APIServerConfig(ServerBaseline):
    """One model server."""

    api_key: str | None = setting(
        None, "The API key, sent as a bearer token. Leave it out for servers without authentication."
    )
    api_key_variable: str | None = setting(
        None,
        "The environment variable that has the API key, for models of an evaluation set with different keys; none: no "
        "key is sent.",
    )
    base_url: str | None = setting(
        None,
        "The address of the server, for example http://127.0.0.1:8000/v1; /v1 is optional.",
    )
    n_kwarg_is_ignored: bool = setting(False, "Send n requests in place of one with `n`, for servers that ignore `n`.")
    stream: bool = setting(
        False,
        "Request replies as streams, for servers and proxies that close silent connections.",
    )
    health_check: bool = setting(
        True, "Check at the start that the server answers and accepts tools. The check samples at most one short reply."
    )
    replay_file: str | None = host_path(
        None,
        "The JSONL file of recorded trajectories that the model name `replay` plays.",
    )
