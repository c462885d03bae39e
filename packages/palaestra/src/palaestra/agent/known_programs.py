"""The third-party agents that `--agent` knows by name, with the settings that make each one call the run's model.

Every entry was run in a slot without a network; docs/agents.md has the table. The settings follow the documentation and
the source of the version that is named here.
"""

from __future__ import annotations

import importlib.resources
import json
import shlex
from collections.abc import Callable, Mapping
from typing import cast

from palaestra.agent.programs import (
    HOME,
    MCP_FILE,
    MODEL,
    TOOL_S,
    TOOL_SERVER,
    AgentAssignment,
    AgentProgram,
    CommandProgram,
    HostedAgent,
    NpmProgram,
    PipProgram,
    mcp_file,
)
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io import plugins
from palaestra_slots.core.types import JSON

CONTEXT_TOKENS, OUTPUT_TOKENS = 128_000, 16_000
"""The sizes that agents are told which want to know them. The run's own limits decide."""

NODE = "22.23.3"
"""The Node.js for agents that need a newer one than 20."""


def _codex(assignment: AgentAssignment) -> Mapping[str, str]:
    return {
        f"{HOME}/.codex/config.toml": f"""\
model = "{MODEL}"
model_provider = "palaestra"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[model_providers.palaestra]
name = "palaestra"
base_url = "{assignment.openai_url}"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
[analytics]
enabled = false
"""
        + (_CODEX_TOOLS.format(url=assignment.tools_url) if assignment.tools_url else "")
    }


_CODEX_TOOLS = f"""\
[mcp_servers.{TOOL_SERVER}]
url = "{{url}}"
bearer_token_env_var = "OPENAI_API_KEY"
tool_timeout_sec = {TOOL_S}
"""


def _opencode(assignment: AgentAssignment) -> Mapping[str, str]:
    options = {"baseURL": assignment.openai_url, "apiKey": assignment.key}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "palaestra", "options": options, "models": {MODEL: {}}}
    settings: JSON = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"palaestra": provider},
        "model": f"palaestra/{MODEL}",
        "small_model": f"palaestra/{MODEL}",
        "permission": {"bash": "allow", "edit": "allow", "webfetch": "deny"},
        "autoupdate": False,
        "share": "disabled",
    }
    if assignment.tools_url:
        remote = {"type": "remote", "url": assignment.tools_url, "headers": assignment.headers, "enabled": True}
        settings["mcp"] = {TOOL_SERVER: {**remote, "oauth": False, "timeout": TOOL_S * 1000}}
    return {f"{HOME}/.config/opencode/opencode.json": json.dumps(settings)}


def _pi(assignment: AgentAssignment) -> Mapping[str, str]:
    provider = {
        "baseUrl": assignment.openai_url,
        "apiKey": assignment.key,
        "api": "openai-completions",
        "models": [{"id": MODEL, "contextWindow": CONTEXT_TOKENS, "maxTokens": OUTPUT_TOKENS}],
    }
    files = {f"{HOME}/.pi/agent/models.json": json.dumps({"providers": {"palaestra": provider}})}
    if assignment.tools_url:
        extension = importlib.resources.files("palaestra.agent").joinpath("pi_tools.ts").read_text()
        files |= {**mcp_file(assignment), f"{HOME}/.pi/agent/extensions/{TOOL_SERVER}.ts": extension}
    return files


def _qwen_code(assignment: AgentAssignment) -> Mapping[str, str]:
    settings: JSON = {
        "security": {"auth": {"selectedType": "openai"}},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
        "tools": {"approvalMode": "yolo", "toolSearch": {"enabled": False}},  # the model sees every tool
    }
    if assignment.tools_url:
        server = {"httpUrl": assignment.tools_url, "headers": assignment.headers, "timeout": TOOL_S * 1000}
        settings["mcpServers"] = {TOOL_SERVER: {**server, "trust": True}}
    return {f"{HOME}/.qwen/settings.json": json.dumps(settings)}


def _cline(assignment: AgentAssignment) -> Mapping[str, str]:
    provider = "openai-compatible"
    settings = {"provider": provider, "apiKey": assignment.key, "model": MODEL, "baseUrl": assignment.openai_url}
    entry = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    providers: JSON = {"version": 1, "lastUsedProvider": provider, "modes": {}, "providers": {provider: entry}}
    files = {f"{HOME}/.cline/data/settings/providers.json": json.dumps(providers)}
    if assignment.tools_url:
        transport = {"type": "streamableHttp", "url": assignment.tools_url, "headers": assignment.headers}
        # In seconds; the time limits of most other agents are in milliseconds.
        servers: JSON = {"mcpServers": {TOOL_SERVER: {"transport": transport, "timeout": TOOL_S}}}
        files[f"{HOME}/.cline/data/settings/cline_mcp_settings.json"] = json.dumps(servers)
    return files


def _continue(assignment: AgentAssignment) -> Mapping[str, str]:
    model = {"provider": "openai", "model": MODEL, "apiBase": assignment.openai_url, "apiKey": assignment.key}
    capable = {"name": MODEL, **model, "roles": ["chat"], "capabilities": ["tool_use"]}
    config: JSON = {"name": "palaestra", "version": "1.0.0", "schema": "v1", "models": [capable]}
    if assignment.tools_url:
        server = {"name": TOOL_SERVER, "type": "streamable-http", "url": assignment.tools_url}
        config["mcpServers"] = [{**server, "requestOptions": {"headers": assignment.headers}}]
    return {_CONTINUE: json.dumps(config)}  # YAML contains JSON


_CONTINUE = f"{HOME}/continue.yaml"


def _copilot(assignment: AgentAssignment) -> Mapping[str, str]:
    if not assignment.tools_url:
        return {}
    server = {"type": "http", "url": assignment.tools_url, "headers": assignment.headers, "tools": ["*"]}
    return {f"{HOME}/.copilot/mcp-config.json": json.dumps({"mcpServers": {TOOL_SERVER: server}})}


def _nanocoder(assignment: AgentAssignment) -> Mapping[str, str]:
    provider = {"name": "palaestra", "baseUrl": assignment.openai_url, "apiKey": assignment.key, "models": [MODEL]}
    config: JSON = {"nanocoder": {"providers": [provider]}}
    files = {f"{_NANOCODER}/agents.config.json": json.dumps(config)}
    if assignment.tools_url:
        server = {"transport": "http", "url": assignment.tools_url, "headers": assignment.headers}
        servers: JSON = {"mcpServers": {TOOL_SERVER: {**server, "alwaysAllow": ["*"]}}}
        files[f"{_NANOCODER}/.mcp.json"] = json.dumps(servers)
    return files


_NANOCODER = f"{HOME}/nanocoder"


def _kimi_code(assignment: AgentAssignment) -> Mapping[str, str]:
    provider = f'type = "openai"\nbase_url = "{assignment.openai_url}"\napi_key = "{assignment.key}"\n'
    model = f'provider = "palaestra"\nmodel = "{MODEL}"\nmax_context_size = {CONTEXT_TOKENS}\n'
    config = f'default_model = "{MODEL}"\n[providers.palaestra]\n{provider}[models.{MODEL}]\n{model}'
    files = {f"{_KIMI}/config.toml": config}
    if assignment.tools_url:
        server = {"url": assignment.tools_url, "headers": assignment.headers}
        files[f"{_KIMI}/mcp.json"] = json.dumps({"mcpServers": {TOOL_SERVER: server}})
    return files


_KIMI = f"{HOME}/.kimi-code"


def _code_puppy(assignment: AgentAssignment) -> Mapping[str, str]:
    endpoint = {"url": assignment.openai_url, "api_key": assignment.key}
    model = {"type": "custom_openai", "name": MODEL, "custom_endpoint": endpoint, "context_length": CONTEXT_TOKENS}
    return {
        f"{_PUPPY}/puppy.cfg": f"[puppy]\npuppy_name = palaestra\nowner_name = palaestra\nmodel = {MODEL}\n",
        f"{_PUPPY}/extra_models.json": json.dumps({MODEL: model}),
    }


_PUPPY = f"{HOME}/.code_puppy"


def _hermes_agent(assignment: AgentAssignment) -> Mapping[str, str]:
    model = {"default": MODEL, "provider": "custom", "base_url": assignment.openai_url, "api_key": assignment.key}
    config: JSON = {"model": {**model, "context_length": CONTEXT_TOKENS}}
    return {f"{HOME}/.hermes/config.yaml": json.dumps(config)}  # YAML contains JSON


def _fast_agent(assignment: AgentAssignment) -> Mapping[str, str]:
    config: JSON = {
        "generic": {"base_url": assignment.openai_url, "api_key": assignment.key},
    }
    if assignment.tools_url:
        server = {"transport": "http", "url": assignment.tools_url, "headers": assignment.headers}
        config["mcp"] = {"servers": {TOOL_SERVER: server}}
    return {f"{_FAST_AGENT}/fast-agent.yaml": json.dumps(config)}  # YAML contains JSON


_FAST_AGENT, _GENERIC = f"{HOME}/fast-agent", f"generic.{MODEL}"


def _oh_my_pi(assignment: AgentAssignment) -> Mapping[str, str]:
    provider = {"baseUrl": assignment.openai_url, "apiKey": assignment.key, "api": "openai-completions"}
    settings = {"startup": {"checkUpdate": False}, "tools": {"xdev": False}}  # the model sees every tool
    model = {"id": MODEL, "name": MODEL, "contextWindow": CONTEXT_TOKENS, "maxTokens": OUTPUT_TOKENS}
    files = {
        f"{_OH_MY_PI}/models.yml": json.dumps({"providers": {"palaestra": {**provider, "models": [model]}}}),
        f"{_OH_MY_PI}/config.yml": json.dumps(settings),
    }
    if assignment.tools_url:
        files[f"{_OH_MY_PI}/mcp.json"] = mcp_file(assignment)[MCP_FILE]
    return files


_OH_MY_PI = f"{HOME}/.omp/agent"


_OPEN_INTERPRETER = f"""
import os, sys
from interpreter import interpreter
interpreter.auto_run = interpreter.offline = interpreter.plain_text_display = True
interpreter.llm.model, interpreter.llm.supports_functions = "openai/{MODEL}", True
interpreter.llm.api_base, interpreter.llm.api_key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
interpreter.llm.context_window, interpreter.llm.max_tokens = {CONTEXT_TOKENS}, {OUTPUT_TOKENS}
interpreter.chat(sys.argv[1])
"""
"""Its command line reads one line of a prompt, so this starts it as its documentation of the Python API does."""


def _openhands(assignment: AgentAssignment) -> Mapping[str, str]:
    return {f"{HOME}/.openhands/mcp.json": text for text in mcp_file(assignment).values()}


def _mistral_vibe(assignment: AgentAssignment) -> Mapping[str, str]:
    provider = {"name": "palaestra", "api_base": assignment.openai_url, "api_key_env_var": "OPENAI_API_KEY"}
    model = {"name": MODEL, "alias": MODEL, "provider": "palaestra"}
    config = f'''\
active_model = "{MODEL}"
enable_update_checks = false
enable_telemetry = false
[[providers]]
{_toml(provider)}
[[models]]
{_toml(model)}
'''
    if assignment.tools_url:
        server = {"name": TOOL_SERVER, "transport": "streamable-http", "url": assignment.tools_url}
        headers = _toml(assignment.headers)
        config += f"[[mcp_servers]]\n{_toml(server)}\ntool_timeout_sec = {TOOL_S}\n[mcp_servers.headers]\n{headers}\n"
    return {f"{HOME}/.vibe/config.toml": config}


def _toml(values: Mapping[str, str]) -> str:
    return "\n".join(f"{name} = {json.dumps(value)}" for name, value in values.items())


PROGRAMS: Mapping[str, AgentProgram] = {
    "codex": NpmProgram("codex", "@openai/codex", "0.169.0", ["exec", "--skip-git-repo-check", "{prompt}"], _codex),
    "claude-code": NpmProgram(
        "claude-code",
        "@anthropic-ai/claude-code",
        "2.1.197",
        ["-p", "{prompt}", "--dangerously-skip-permissions", "--model", MODEL],
        env={
            # Otherwise, Claude Code refuses `--dangerously-skip-permissions` to root.
            "IS_SANDBOX": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "MCP_TOOL_TIMEOUT": str(TOOL_S * 1000),
        },
        tool_arguments=["--mcp-config", MCP_FILE, "--strict-mcp-config"],
        program="claude",
    ),
    "opencode": NpmProgram(
        "opencode", "opencode-ai", "1.18.33", ["run", "{prompt}"], _opencode, {"OPENCODE_DISABLE_MODELS_FETCH": "1"}
    ),
    "pi": NpmProgram(
        "pi",
        "@mariozechner/pi-coding-agent",
        "0.73.1",
        ["--provider", "palaestra", "--model", MODEL, "-p", "{prompt}"],
        _pi,
        {"PI_OFFLINE": "1"},
    ),
    "qwen-code": NpmProgram(
        "qwen-code",
        "@qwen-code/qwen-code",
        "0.24.4",
        ["--yolo", "{prompt}"],
        _qwen_code,
        {"OPENAI_MODEL": MODEL, "QWEN_SANDBOX": "false"},
        program="qwen",
    ),
    "cline": NpmProgram("cline", "cline", "3.0.65", ["--auto-approve", "true", "{prompt}"], _cline),
    "continue": NpmProgram(
        "continue",
        "@continuedev/cli",
        "1.5.47",
        ["--print", "--auto", "--config", _CONTINUE, "{prompt}"],
        _continue,
        {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_CLI_AUTO_UPDATED": "1"},
        program="cn",
    ),
    "copilot": NpmProgram(
        "copilot",
        "@github/copilot",
        "1.0.102",
        ["--prompt", "{prompt}", "--allow-all-tools", "--allow-all-paths"],
        _copilot,
        {
            "COPILOT_OFFLINE": "true",
            "COPILOT_PROVIDER_BASE_URL": "{openai_url}",
            "COPILOT_PROVIDER_API_KEY": "{key}",
            "COPILOT_MODEL": MODEL,
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(CONTEXT_TOKENS),
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(OUTPUT_TOKENS),
        },
    ),
    "nanocoder": NpmProgram(
        "nanocoder",
        "@nanocollective/nanocoder",
        "1.30.0",
        ["--plain", "--trust-directory", "--mode", "yolo", "run", "{prompt}"],
        _nanocoder,
        {
            "NANOCODER_PROVIDERS_FILE": f"{_NANOCODER}/agents.config.json",
            "NANOCODER_MCPSERVERS_FILE": f"{_NANOCODER}/.mcp.json",
            "NANOCODER_CONTEXT_LIMIT": str(CONTEXT_TOKENS),
        },
        node=NODE,
    ),
    "grok-cli": NpmProgram(
        "grok-cli",
        "@vibe-kit/grok-cli",
        "0.0.34",
        ["--prompt", "{prompt}"],
        env={"GROK_API_KEY": "{key}", "GROK_BASE_URL": "{openai_url}", "GROK_MODEL": MODEL},
        program="grok",
        tools_by_command=True,
    ),
    "kimi-code": NpmProgram(
        "kimi-code",
        "@moonshot-ai/kimi-code",
        "2.1.0",
        ["--prompt", "{prompt}"],
        _kimi_code,
        {"KIMI_CODE_HOME": _KIMI, "KIMI_CODE_NO_AUTO_UPDATE": "1"},
        program="kimi",
        node=NODE,
    ),
    "gptme": PipProgram(
        "gptme",
        "gptme",
        "0.35.1",
        ["--non-interactive", "--tool-format", "tool", "--model", f"local/{MODEL}", "{prompt}"],
        tools_by_command=True,
    ),
    "code-puppy": PipProgram(
        "code-puppy",
        "code-puppy",
        "0.0.946",
        ["--yolo", "true", "--prompt", "{prompt}"],
        _code_puppy,
        tools_by_command=True,
    ),
    "hermes-agent": PipProgram(
        "hermes-agent",
        "hermes-agent",
        "0.19.0",
        ["chat", "--yolo", "--quiet", "--query", "{prompt}"],
        _hermes_agent,
        program="hermes",
        tools_by_command=True,
    ),
    "mini-swe-agent": PipProgram(
        "mini-swe-agent",
        "mini-swe-agent",
        "2.4.6",
        ["--yolo", "--exit-immediately", "--cost-limit", "0", "--model", f"openai/{MODEL}", "--task", "{prompt}"],
        env={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": f"{HOME}/mini-swe-agent",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise litellm fetches its price list from the network
        },
        program="mini",
        tools_by_command=True,
        also=("litellm[mcp]==1.106.2",),  # litellm imports `mcp` for every request with tools
    ),
    "fast-agent": PipProgram(
        "fast-agent",
        "fast-agent-mcp",
        "0.10.48",
        # Without the workspace, its shell works in the folder of its settings.
        ["go", "--workspace", ".", "--home", _FAST_AGENT, "--model", _GENERIC, "--shell", "--message", "{prompt}"],
        _fast_agent,
        tool_arguments=["--servers", TOOL_SERVER],
        python="3.13",
    ),
    "oh-my-pi": NpmProgram(
        "oh-my-pi",
        "@oh-my-pi/pi-coding-agent",
        "18.2.3",
        ["--model", f"palaestra/{MODEL}", "--auto-approve", "--no-title", "--print", "{prompt}"],
        _oh_my_pi,
        program="omp",
        bun="1.4.5",
    ),
    "open-interpreter": PipProgram(
        "open-interpreter",
        "open-interpreter",
        "0.4.3",
        ["-c", _OPEN_INTERPRETER, "{prompt}"],
        env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        program="python",
        tools_by_command=True,
        also=("setuptools<80",),  # for its `pkg_resources`
    ),
    "openhands": PipProgram(
        "openhands",
        "openhands",
        "1.16.0",
        ["--headless", "--always-approve", "--override-with-envs", "--task", "{prompt}"],
        _openhands,
        {
            "LLM_MODEL": f"openai/{MODEL}",
            "LLM_BASE_URL": "{openai_url}",
            "LLM_API_KEY": "{key}",
            "OPENHANDS_SUPPRESS_BANNER": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        python="3.12",
    ),
    "mistral-vibe": PipProgram(
        "mistral-vibe",
        "mistral-vibe",
        "2.26.1",
        # The newer harness offers the tools of MCP servers only to TypeScript that the model writes.
        ["--legacy-harness", "--trust", "--auto-approve", "--prompt", "{prompt}"],
        _mistral_vibe,
        program="vibe",
        python="3.12",
    ),
}


LIBRARIES = "palaestra.agents"
"""The group of entry points for agents of other libraries. The name of an entry point is the KIND of an agent
`KIND:NAME`; its function takes NAME and returns a `HostedAgent`, or raises `ConfigError`."""


def program_named(name: str) -> AgentProgram | HostedAgent:
    """Return the program with this name, or the agent `KIND:NAME` of another library; any other text is taken as a
    command line. Raises `ConfigError` if the text is empty or is not a valid command line, or if the library is not
    installed."""
    if name in PROGRAMS:
        return PROGRAMS[name]
    kind, colon, named = name.partition(":")
    if colon and kind in (libraries := plugins.installed(LIBRARIES)):
        return cast("Callable[[str], HostedAgent]", plugins.load_from_extra(libraries[kind], "agents"))(named)
    try:
        words = shlex.split(name)
    except ValueError as error:
        raise ConfigError(f"the agent {name!r} is not a valid command line: {error}") from None
    if not words:
        raise ConfigError(f"the agent is empty: set it to one of {', '.join(PROGRAMS)}, or to a command line")
    return CommandProgram(name)
