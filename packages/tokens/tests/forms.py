"""How each format writes calls, from the families' own templates; written apart from the library's `render`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Arguments = Mapping[str, Any]
Wanted = tuple[str, dict[str, Any]]

MARK = re.compile(r"<[^<>\n]*[a-z][^<>\n]*>|\[/?[A-Z_]+\]|```(?:json)?")
"""What the forms write around names and values."""


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Form:
    """One way in which one format is written. `element` writes a call, `block` puts calls together.

    `tags` are the format's own marks, to be put into strings. `json` says that `element` takes any text as arguments.
    `self_closing`: a call is over by itself, so an output may be cut right after it.
    `misnamed`: what makes a call nameless in the place of its name.
    """

    id: str
    format: str
    element: Callable[[str, str, Arguments, int], str]
    join: str = "\n"
    open: str = ""
    close: str = ""
    tags: tuple[str, ...] = ()
    json: bool = True
    self_closing: bool = False
    before: str = "{}\n"
    after: str = "\n{}"
    think: str = "<think>{}</think>\n"
    repeats: bool = True
    misnamed: tuple[str, ...] = ("",)

    def block(self, calls: Sequence[Wanted]) -> str:
        return self.raw_block([(name, dumps(arguments), arguments) for name, arguments in calls])

    def raw_block(self, calls: Sequence[tuple[str, str, Arguments]]) -> str:
        elements = [self.element(name, text, arguments, index) for index, (name, text, arguments) in enumerate(calls)]
        return self.open + self.join.join(elements) + self.close


def _object(key: str) -> Callable[[str, str, Arguments, int], str]:
    return lambda name, text, _, __: f'{{"name": {dumps(name)}, "{key}": {text}}}'


def _between(begin: str, end: str) -> Callable[[str, str, Arguments, int], str]:
    return lambda name, text, _, __: f'{begin}{{"name": {dumps(name)}, "arguments": {text}}}{end}'


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def _qwen3(name: str, _: str, arguments: Arguments, __: int) -> str:
    values = "".join(f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<function={name}>\n{values}</function>"


def _qwen3_tagged(name: str, text: str, arguments: Arguments, index: int) -> str:
    return f"<tool_call>\n{_qwen3(name, text, arguments, index)}\n</tool_call>"


def _invoke(prefix: str, attribute: bool) -> Callable[[str, str, Arguments, int], str]:
    def element(name: str, _: str, arguments: Arguments, __: int) -> str:
        lines = [f'<{prefix}invoke name="{name}">']
        for key, value in arguments.items():
            said = f' string="{dumps(isinstance(value, str))}"' if attribute else ""
            lines.append(f'<{prefix}parameter name="{key}"{said}>{_bare(value)}</{prefix}parameter>')
        return "\n".join([*lines, f"</{prefix}invoke>"])

    return element


def _glm(line: str) -> Callable[[str, str, Arguments, int], str]:
    def element(name: str, _: str, arguments: Arguments, __: int) -> str:
        pairs = [
            f"<arg_key>{key}</arg_key>{line}<arg_value>{_bare(value)}</arg_value>{line}"
            for key, value in arguments.items()
        ]
        return f"<tool_call>{name}{line}{''.join(pairs)}</tool_call>"

    return element


def _python(name: str, _: str, arguments: Arguments, __: int) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


_HERMES = ("<tool_call>", "</tool_call>", '</tool_call>\n<tool_call>\n{"name')
_SEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁calls▁end｜>")
_DSML = ("｜DSML｜", "<｜DSML｜parameter", "</｜DSML｜function_calls>", "</｜DSML｜invoke> ")
_UNQUOTED = ("", 'search" x="y', '" x="y', 'search"y')
_HARMONY = {
    "before": "<|channel|>commentary<|message|>{}<|end|><|start|>assistant",
    "after": "<|start|>assistant<|channel|>final<|message|>{}<|return|>",
    "think": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
}

FORMS = [
    Form("hermes", "hermes", _between("<tool_call>\n", "\n</tool_call>"), tags=_HERMES),
    Form("hermes inline", "hermes", _between("<tool_call>", "</tool_call>"), "", tags=_HERMES),
    Form("qwen", "qwen", _between("<tool_call>\n", "\n</tool_call>"), tags=_HERMES),
    Form("qwen crlf", "qwen", _between("<tool_call>\r\n", "\r\n</tool_call>"), "\r\n", tags=_HERMES),
    Form(
        "longcat",
        "longcat",
        _between("<longcat_tool_call>", "</longcat_tool_call>"),
        tags=("<longcat_tool_call>", "</longcat_tool_call>", '</longcat_tool_call><longcat_tool_call>{"name'),
    ),
    Form(
        "mistral list",
        "mistral",
        _object("arguments"),
        ", ",
        "[TOOL_CALLS] [",
        "]",
        ("[TOOL_CALLS]", "]", "}]", '[TOOL_CALLS] [{"name'),
    ),
    Form(
        "mistral v11",
        "mistral",
        lambda name, text, _, __: f"[TOOL_CALLS]{name}{text}",
        "",
        tags=("[TOOL_CALLS]", "[TOOL_CALLS]noop{}"),
        self_closing=True,
    ),
    Form(
        "mistral v13",
        "mistral",
        lambda name, text, _, __: f"[TOOL_CALLS]{name}[ARGS]{text}",
        "",
        tags=("[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]noop[ARGS]{}"),
        self_closing=True,
        think="[THINK]{}[/THINK]",
    ),
    Form(
        "mistral ids",
        "mistral",
        lambda name, text, _, index: f"[TOOL_CALLS]{name}[CALL_ID]abcdefgh{index}[ARGS]{text}",
        "",
        tags=("[CALL_ID]",),
        self_closing=True,
    ),
    Form(
        "llama3",
        "llama3_json",
        _object("parameters"),
        "; ",
        "<|python_tag|>",
        tags=("<|python_tag|>", '; {"name": "', '{"name": "f", "parameters": {}}'),
        self_closing=True,
    ),
    Form(
        "llama3 bare",
        "llama3_json",
        _object("parameters"),
        "; ",
        tags=("<|python_tag|>", "{", "}"),
        self_closing=True,
    ),
    Form(
        "llama4 arguments",
        "llama4_json",
        _object("arguments"),
        "; ",
        "<|python_tag|>",
        tags=("<|python_tag|>", "}; {"),
        self_closing=True,
    ),
    Form("granite", "granite", _object("arguments"), ", ", "<|tool_call|>[", "]", ("<|tool_call|>", "]", "}]")),
    Form("granite 3.3", "granite", _object("arguments"), ",\n", "<tool_call> [", "]", ("<tool_call>", "[{")),
    Form("granite4", "granite4", _between("<tool_call>\n", "\n</tool_call>"), tags=_HERMES),
    Form(
        "deepseek v3",
        "deepseek_v3",
        lambda name, text, _, __: (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"
        ),
        "\n",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        (*_SEEK, "```", "```<｜tool▁call▁end｜>"),
        self_closing=True,
    ),
    Form(
        "deepseek v3 crlf",
        "deepseek_v3",
        lambda name, text, _, __: (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\r\n```json\r\n{text}\r\n```<｜tool▁call▁end｜>"
        ),
        "\r\n",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        _SEEK,
        self_closing=True,
    ),
    Form(
        "deepseek v3.1",
        "deepseek_v3_1",
        lambda name, text, _, __: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        _SEEK,
        self_closing=True,
    ),
    Form(
        "kimi k2",
        "kimi_k2",
        lambda name, text, _, index: (
            f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{text}<|tool_call_end|>"
        ),
        "",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        ("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>functions.f:0"),
        self_closing=True,
    ),
    Form(
        "gpt-oss",
        "gpt_oss",
        lambda name, text, _, __: (
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}<|call|>"
        ),
        "<|start|>assistant",
        tags=("<|call|>", "<|end|>", "<|channel|>commentary to=", "<|start|>assistant"),
        **_HARMONY,
    ),
    Form(
        "gpt-oss recipient first",
        "gpt_oss",
        lambda name, text, _, __: f" to=functions.{name}<|channel|>commentary json<|message|>{text}<|call|>",
        "<|start|>assistant",
        "<|start|>assistant",
        tags=("<|call|>", "<|message|>"),
        **(
            _HARMONY
            | {
                "before": "<|channel|>commentary<|message|>{}<|end|>",
                "think": "<|channel|>analysis<|message|>{}<|end|>",
            }
        ),
    ),
    Form(
        "qwen3 coder",
        "qwen3_coder",
        _qwen3_tagged,
        tags=("</tool_call>", "<tool_call>", "</parameter>", "</function>", "<parameter=x>", "<function=f>"),
        json=False,
    ),
    Form(
        "qwen3 coder bare", "qwen3_coder", _qwen3, tags=("</tool_call>", "</parameter>"), json=False, self_closing=True
    ),
    Form(
        "qwen3 coder in one section",
        "qwen3_coder",
        _qwen3,
        "\n",
        "<tool_call>\n",
        "\n</tool_call>",
        ("</tool_call>", "</parameter>", "<parameter=x>"),
        json=False,
    ),
    Form(
        "minimax m2",
        "minimax_m2",
        _invoke("", False),
        "\n",
        "<minimax:tool_call>\n",
        "\n</minimax:tool_call>",
        ("</minimax:tool_call>", "</parameter>", "</invoke>", '<parameter name="x">', "<minimax:tool_call>"),
        json=False,
        self_closing=True,
        misnamed=_UNQUOTED,
    ),
    Form(
        "deepseek v3.2",
        "deepseek_v3_2",
        _invoke("｜DSML｜", True),
        "\n",
        "<｜DSML｜function_calls>\n",
        "\n</｜DSML｜function_calls>",
        _DSML,
        json=False,
        self_closing=True,
        misnamed=_UNQUOTED,
    ),
    Form(
        "deepseek v4",
        "deepseek_v4",
        _invoke("｜DSML｜", True),
        "\n",
        "<｜DSML｜tool_calls>\n",
        "\n</｜DSML｜tool_calls>",
        _DSML,
        json=False,
        self_closing=True,
        misnamed=_UNQUOTED,
    ),
    Form("glm 4.5", "glm45", _glm("\n"), tags=("</tool_call>", "<tool_call>", "</arg_value>", "<arg_key>"), json=False),
    Form(
        "glm 4.7", "glm47", _glm(""), "", tags=("</tool_call>", "<tool_call>", "</arg_value>", "<arg_key>"), json=False
    ),
    Form(
        "pythonic", "llama4_pythonic", _python, ", ", "[", "]", ("]", "[", ")]", "[f()]", "<|python_end|>"), json=False
    ),
    Form(
        "pythonic marked",
        "llama4_pythonic",
        _python,
        ",",
        "<|python_start|>[",
        "]<|python_end|>",
        ("<|python_end|>", ")]"),
        json=False,
    ),
]
