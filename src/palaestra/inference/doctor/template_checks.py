"""How a model's conversations are written: does the template show tools, keep history, and write calls as read?

Looks at tokenizer, template and parser only; no server is asked. The same renderer that a run uses gives the answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON, Message
from palaestra.inference.doctor.checks import Check, failed, not_applicable, passed
from palaestra.inference.parsers import GrammarParser, get_parser, list_parsers
from palaestra.inference.templates import ChatFormat, History, TurnRenderer
from palaestra.inference.templates.jinja import ChatTemplate, template_of
from palaestra.inference.templates.messages import for_template
from palaestra.inference.tokenizers import Tokenizer

TEMPLATE, PREFIX, ROUND_TRIP = "template renders tools", "prefix-preserving", "parser round trip"
WRITING = (TEMPLATE, PREFIX, ROUND_TRIP)

TOOL: dict[str, JSON] = {
    "type": "function",
    "function": {
        "name": "look_up_word",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}, "limit": {"type": "integer"}},
            "required": ["word"],
        },
    },
}
ARGUMENTS = {"word": 'näive "x" </tool_call>', "limit": 3}
"""Arguments that are easy to get wrong: quotes, a closing tag, letters beyond ASCII, a number."""

_PLAIN_ARGUMENTS = {"word": "naive", "limit": 3}
_USER: Message = {"role": "user", "content": "Which word?"}
_RESULT: Message = {"role": "tool", "tool_call_id": "call00001", "name": "look_up_word", "content": "1 found"}


def writing_checks(tokenizer: Tokenizer, template: str | None, parser: str) -> Iterator[Check]:
    """The three answers, in order; the later ones are not asked when the first is no."""
    try:
        source = template_of(tokenizer, template)
        renderer = ChatFormat(tokenizer, template).renderer([TOOL])
    except ConfigError as error:
        yield failed(TEMPLATE, str(error), "Name a template with tools: --openai.chat_template FILE.")
        yield from (not_applicable(name, "there is no template to look at") for name in (PREFIX, ROUND_TRIP))
        return
    ends = ", ".join(repr(tokenizer.decode([stop], skip_special_tokens=False)) for stop in renderer.stop_ids)
    yield passed(TEMPLATE, f"tools and results are shown; a turn ends with {ends}")
    yield _prefix(renderer)
    yield _round_trip(renderer, source, tokenizer, parser)


def _prefix(renderer: TurnRenderer) -> Check:
    """Whether what was sampled is still there when the conversation goes on."""
    problems = []
    for after, reply, new in (
        ("a tool's result", _calling(ARGUMENTS), _RESULT),
        ("the user's next message", {"role": "assistant", "content": "This one."}, _USER),
    ):
        for thinks in (False, True):
            said: Message = {**reply, **({"reasoning_content": "Let me see."} if thinks else {})}
            try:
                history = History(prompt=[_USER], reply=said, kinds=renderer.opening([_USER]).kinds)
                rewrites = renderer.step(history, [new], renderer.stop_ids[0]).rewrites
            except ConfigError as error:
                rewrites = str(error)
            if rewrites:
                problems.append(f"before {after}{', with thinking,' if thinks else ''} {rewrites}")
                break
    if not problems:
        return passed(PREFIX, "what was sampled stays as it is when the conversation goes on")
    return failed(
        PREFIX,
        "; ".join(problems),
        "Nothing is lost: each rewrite begins a row of its own. For one row per rollout set --openai.history append, "
        "or use a template that keeps thinking (--openai.chat_template FILE).",
    )


def _round_trip(renderer: TurnRenderer, template: ChatTemplate, tokenizer: Tokenizer, parser: str) -> Check:
    """Whether the parser reads the calls that the template writes: the model has learned the template's form."""
    written = {}
    for arguments in (_PLAIN_ARGUMENTS, ARGUMENTS):
        text = _written(renderer, template, tokenizer, arguments)
        if text is None:
            return not_applicable(ROUND_TRIP, "the template does not write a reply after the prompt for one")
        written[text] = arguments
    try:
        chosen = get_parser(parser)
    except KeyError as error:
        return failed(
            ROUND_TRIP, str(error.args[0]), f"Set --openai.tool_parser to one of {', '.join(list_parsers())}."
        )
    missed = [text for text, arguments in written.items() if not _reads(chosen, text, arguments)]
    if not missed:
        return passed(ROUND_TRIP, f"{parser} reads the calls that the template writes")
    fitting = [name for name in list_parsers() if all(_reads(get_parser(name), *pair) for pair in written.items())]
    return failed(
        ROUND_TRIP,
        f"{parser} does not read {missed[0]!r}",
        f"Set --openai.tool_parser to one that does: {', '.join(fitting)}."
        if fitting
        else "No parser here reads this form: register one.",
    )


def _written(
    renderer: TurnRenderer, template: ChatTemplate, tokenizer: Tokenizer, arguments: dict[str, JSON]
) -> str | None:
    """A call as the template writes it, up to the token that ends the turn."""

    def rendered(messages: Sequence[Message], generation: bool) -> str:
        ready = for_template(messages, renderer.traits.reasoning_field)
        return template.render(ready, tools=[TOOL], add_generation_prompt=generation)

    prompt, whole = rendered([_USER], True), rendered([_USER, _calling(arguments), _RESULT], False)
    if not whole.startswith(prompt):
        return None
    reply = whole[len(prompt) :]
    ends = [tokenizer.decode([stop], skip_special_tokens=False) for stop in renderer.stop_ids]
    cuts = [at for end in ends if (at := reply.find(end)) >= 0]
    return reply[: min(cuts)] if cuts else None


def _reads(parser: GrammarParser, text: str, arguments: dict[str, JSON]) -> bool:
    """Whether the parser finds this one call and nothing else, no text around it either."""
    parsed = parser.parse(text, tools=[TOOL])
    found = [(call.name, call.arguments) for call in parsed.calls]
    return found == [("look_up_word", arguments)] and not parsed.errors and not (parsed.content or "").strip()


def _calling(arguments: dict[str, JSON]) -> Message:
    call = {"id": "call00001", "type": "function", "function": {"name": "look_up_word", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
