"""The example of IFEval: its verdicts on replies, against the original's where that is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import palaestra
from palaestra.cli.main import main
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

EXAMPLE = Path(__file__).parents[2] / "examples/ifeval.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("ifeval_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WORDS = [
    "Rain",
    "falls",
    "on",
    "TESTS",
    "and",
    "hills.",
    "We",
    "wait,",
    "gladly!",
    "Why?",
    "café",
    "I'm",
    "it's",
    "10.5",
]
PIECES = [
    *(
        "\n\n",
        "\n",
        "***",
        "******",
        "* a point\n",
        "- another\n",
        "*bold*",
        "**very bold**",
        "* *",
        "[name]",
        "[]",
        "<<A>>",
    ),
    *(
        "<<>>",
        "<<><>>",
        "Section 1",
        "SECTION 2 ",
        "P.S. more",
        "p. p.s. more",
        "P.P.S",
        '"',
        "'",
        "```json",
        "```",
        '{"a": 1}',
    ),
    *("My answer is no.", "Any other questions?", "*\n- b", "Dr. No", "U.S.A. is far.", "..", "-", "**"),
]
RELATIONS = ["less than", "at least"]


def arguments(kind: str, rng: random.Random) -> dict[str, Any]:
    relation, n = rng.choice(RELATIONS), rng.randint(0, 4)
    return {
        "keywords:existence": {"keywords": rng.sample(["rain", "hills", "tests"], 2)},
        "keywords:frequency": {"keyword": " we", "frequency": n, "relation": relation},
        "keywords:forbidden_words": {"forbidden_words": rng.sample(["rain", "point", "why"], 2)},
        "keywords:letter_frequency": {"letter": "A", "let_frequency": n, "let_relation": relation},
        "language:response_language": {"language": "en"},
        "length_constraints:number_sentences": {"num_sentences": n, "relation": relation},
        "length_constraints:number_paragraphs": {"num_paragraphs": n},
        "length_constraints:number_words": {"num_words": 6 * n, "relation": relation},
        "length_constraints:nth_paragraph_first_word": {
            "num_paragraphs": max(n, 1),
            "nth_paragraph": rng.randint(1, max(n, 1)),
            "first_word": rng.choice(["Rain", "we", "i", "why"]),
        },
        "detectable_content:number_placeholders": {"num_placeholders": n},
        "detectable_content:postscript": {"postscript_marker": rng.choice(["P.S.", "P.P.S", "PS: "])},
        "detectable_format:number_bullet_lists": {"num_bullets": n},
        "detectable_format:number_highlighted_sections": {"num_highlights": n},
        "detectable_format:multiple_sections": {"section_spliter": "Section ", "num_sections": n},
        "combination:repeat_prompt": {"prompt_to_repeat": "Rain falls"},
        "startend:end_checker": {"end_phrase": "Any other questions? "},
        "change_case:capital_word_frequency": {"capital_frequency": n, "capital_relation": relation},
    }.get(kind, {})


def cached(detect: Callable[[str], str]) -> Callable[[str], str]:
    """A detector that is asked once for each text, failures included, because it is slow."""
    known: dict[str, Any] = {}

    def find(text: str) -> str:
        if text not in known:
            try:
                known[text] = detect(text)
            except Exception as error:
                known[text] = error
        if isinstance(known[text], Exception):
            raise known[text]
        return str(known[text])

    return find


def a_reply(rng: random.Random) -> str:
    parts = [rng.choice(PIECES if rng.random() < 0.45 else WORDS) for _ in range(rng.randint(1, 14))]
    text = rng.choice([" ", " ", "\n"]).join(parts)
    text = rng.choice([str, str, str.upper, str.lower])(text)
    return rng.choice(
        [
            text,
            f"{text} Any other questions?",
            f'"{text}"',
            f"```json\n{text}\n```",
            f"Rain falls {text}",
            f"{text}\n\n{text}",
        ]
    )


@pytest.mark.slow
def test_verdicts_are_those_of_the_original(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = pytest.importorskip("if_verifiable.ifeval.instructions_registry")
    common, util = (
        pytest.importorskip("if_verifiable.common"),
        pytest.importorskip("if_verifiable.ifeval.instructions_util"),
    )
    import langdetect
    import nltk
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    langdetect.DetectorFactory.seed = 0
    monkeypatch.setattr(langdetect, "detect", cached(langdetect.detect))
    try:
        nltk.sent_tokenize("A. B.")
    except LookupError:  # the trained model is a download, so both sides get the same untrained one
        plain = PunktSentenceTokenizer()
        monkeypatch.setattr(nltk, "sent_tokenize", plain.tokenize)
        monkeypatch.setattr(util, "count_sentences", lambda text: len(plain.tokenize(text)))
        words = nltk.tokenize.NLTKWordTokenizer().tokenize
        monkeypatch.setattr(nltk, "word_tokenize", words)
    kinds, rng = sorted(original.INSTRUCTION_DICT), random.Random(0)
    assert kinds == sorted(example.FOLLOWS)
    seen: dict[tuple[str, bool], int] = {}
    for _ in range(600):
        reply = a_reply(rng)
        chosen = rng.sample(kinds, 8)
        given = [arguments(kind, rng) for kind in chosen]
        results, scores = common.evaluate_instructions(reply, chosen, given, "", original.INSTRUCTION_DICT)
        if not results:
            continue
        task = types.SimpleNamespace(data=[*zip(chosen, given, strict=True)])
        score = example.follows(task, types.SimpleNamespace(final_response=reply.strip()))
        found = {"binary_strict": score.reward, "binary_loose": score.metrics["loose"]}
        found |= {"partial_strict": score.metrics["instructions"], "partial_loose": score.metrics["instructions_loose"]}
        wanted = {name: getattr(scores, name) for name in found}
        assert found == pytest.approx(wanted), (reply, task.data, results)
        for each in results:
            seen[each.instruction_id, each.strict_pass] = seen.get((each.instruction_id, each.strict_pass), 0) + 1
    assert {kind for kind, passed in seen if passed} == {kind for kind, passed in seen if not passed} == set(kinds)


FOLLOWED = [
    ("punctuation:no_comma", {}, "no comma", "one, two"),
    ("keywords:existence", {"keywords": ["rain", "sun"]}, "Sun and RAIN", "rain"),
    ("keywords:forbidden_words", {"forbidden_words": ["rain"]}, "rainy", "It is Rain."),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"}, "a A", "a"),
    ("keywords:letter_frequency", {"letter": "A", "let_frequency": 2, "let_relation": "less than"}, "a", "aA"),
    ("length_constraints:number_words", {"num_words": 2, "relation": "at least"}, "a-b", "a"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a *** b", "a *** *** b"),
    ("detectable_content:number_placeholders", {"num_placeholders": 1}, "[a]", "(a)"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "a\nP.S. b", "a"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n** b"),
    ("detectable_format:constrained_response", {}, "Well: My answer is maybe.", "My answer is perhaps."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "*a*", "* *"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Part", "num_sections": 2},
        "Part 1 a Part 2",
        "Part 1",
    ),
    ("detectable_format:json_format", {}, "```json\n[1]\n```", "{a: 1}"),
    ("detectable_format:title", {}, "<<a>>", "<< >>"),
    ("combination:two_responses", {}, "a ****** b", "a ****** a"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it"}, "say it, b", "b, say it"),
    ("startend:end_checker", {"end_phrase": "Bye."}, '"so, BYE."', "Bye. Bye"),
    ("startend:quotation", {}, '"a"', '"'),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Well"},
        "a\n\n'well, b",
        "a\n\nbut well",
    ),
]


@pytest.mark.parametrize(("kind", "given", "right", "wrong"), FOLLOWED)
def test_an_instruction_is_followed_or_not(
    example: Any, kind: str, given: dict[str, Any], right: str, wrong: str
) -> None:
    assert example.followed(kind, {**given, "other": None}, right)
    assert not example.followed(kind, given, wrong)
    assert not example.followed(kind, given, " ")


def test_a_model_is_evaluated_on_rows_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"key": 1, "prompt": "Write.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"keywords": None}]},
        {
            "key": 2,
            "prompt": "Write.",
            "instruction_id_list": ["punctuation:no_comma", "startend:end_checker"],
            "kwargs": [{}, {"end_phrase": "Bye."}],
        },
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    answer = FakeAnswer(completion("Here it is:\nhello. Bye.\n**Note, too**"))

    async def scenario() -> None:
        async with LoopbackServer(answer, answer) as server:
            given = ["--base-url", server.url, "--model", "m", "--env.data", "rows.jsonl"]
            assert await asyncio.to_thread(main, ["run", str(EXAMPLE), *given]) == 0

    asyncio.run(scenario())
    (folder,) = tmp_path.glob("runs/*/*/")
    found = {each.task_id: each for each in palaestra.open_run(folder).trajectories}
    assert {name: each.reward for name, each in found.items()} == {"1": 0.0, "2": 0.0}
    assert [found["1"].metrics[name] for name in ("loose", "instructions")] == [1.0, 0.0]
    assert [found["2"].metrics[name] for name in ("loose", "instructions", "instructions_loose")] == [1.0, 0.0, 1.0]


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 250  # the original has 1,573 for the instructions alone
