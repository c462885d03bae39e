"""Templates render as they do in `transformers`: whitespace, filters, globals, sandbox."""

from __future__ import annotations

from datetime import datetime

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.templates import ChatTemplate
from palaestra_tokens.templates.jinja import WrittenOnce, for_template, template_of
from palaestra_tokens.testing.fake_engine import CHATML, toy_tokenizer

HI: list[Message] = [{"role": "user", "content": "<é> & 'x'"}]


def rendered(source: str, messages: list[Message] | None = None, **values: JSON) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages or HI, **values)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),  # blocks take their line with them
        ("{{ messages[0].content }}", "<é> & 'x'"),  # nothing is escaped
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<é> & \'x\'"}'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "<é> & \'x\'"\n}'),
        ("{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=true, sort_keys=true) }}", '{"a": 1, "b": "\\u00e9"}'),
        ("{% for i in [0, 1, 2] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% for i in [0, 1, 2] %}{% if i == 1 %}{% break %}{% endif %}{{ i }}{% endfor %}", "0"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{{ bos_token }}{{ eos_token }}", "<s>"),
        ("{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}", "True True True"),
        ("{{ enable_thinking }}", "False"),
    ],
)
def test_semantics(source: str, text: str) -> None:
    assert rendered(source, enable_thinking=False) == text


def test_the_date_is_the_local_one() -> None:
    earliest = datetime.now().replace(microsecond=0)
    text = rendered("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}")
    assert earliest <= datetime.fromisoformat(text) <= datetime.now()


def test_the_date_does_not_change_while_a_run_lasts() -> None:
    days = iter([datetime(2026, 1, 31), datetime(2026, 2, 1)])
    template = ChatTemplate("{{ strftime_now('%d %b') }}", now=lambda: next(days))
    assert [template.render(HI), template.render(HI)] == ["31 Jan", "31 Jan"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.items() }}", "no attribute 'items'"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
    ],
)
def test_a_refusal_has_the_templates_own_words(source: str, words: str) -> None:
    with raises(ConfigError, words):
        rendered(source)


def test_what_is_no_template() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ChatTemplate("{% if %}")


def test_a_tokenizer_without_a_template_needs_one() -> None:
    tokenizer = toy_tokenizer(chat_template=None)
    with pytest.raises(ConfigError, match="pass chat_template="):
        template_of(tokenizer)
    assert template_of(tokenizer, CHATML).source == CHATML


def test_special_tokens_of_a_tokenizer_that_names_them_one_by_one() -> None:
    class Named:
        chat_template = "{{ bos_token }}|{{ eos_token }}"
        bos_token, eos_token = "<s>", "</s>"

        def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
            return []

        def decode(self, ids: object, *, skip_special_tokens: bool = False) -> str:
            return ""

    assert template_of(Named()).render(HI) == "<s>|</s>"


def test_a_schema_is_written_once_and_reads_as_before() -> None:
    tool = {"function": {"name": "é", "parameters": {"x": [1, {"y": 2}]}}}
    source = "{% for t in tools %}{{ t | tojson }}{{ t.function | tojson }}{{ t.function.name }}{% endfor %}"
    assert rendered(source, tools=[WrittenOnce(tool)]) == rendered(source, tools=[tool])
    indented = "{{ tools[0] | tojson(indent=2) }}"
    assert rendered(indented, tools=[WrittenOnce(tool)]) == rendered(indented, tools=[tool])


@pytest.mark.parametrize(
    "how",
    [
        "'> ' + c.function.arguments + ' <'",
        "'> ' + (c['function']['arguments'] | tojson) + ' <'",
        "'> ' ~ (c.function.arguments + ' <')",
    ],
)
def test_arguments_are_an_object_that_templates_may_concatenate(how: str) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% for c in m.tool_calls %}{{ " + how + " }}{% endfor %}{% endfor %}"
    )
    call: JSON = {"id": "1", "function": {"name": "f", "arguments": '{"a": "é", "b": [1]}'}}
    messages = for_template([{"role": "assistant", "content": None, "tool_calls": [call]}], None)
    assert template.render(messages) == '> {"a": "é", "b": [1]} <'
    each = "{% for k, v in messages[0].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }} {% endfor %}"
    assert ChatTemplate(each).render(messages) == "a=é b=[1] "
