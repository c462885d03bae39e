"""IFEval: 25 kinds of instructions whose following a program can check (https://arxiv.org/abs/2311.07911).

    pip install datasets langdetect nltk && python -c "import nltk; nltk.download('punkt_tab')"
    palaestra eval examples/ifeval.py --model NAME --base-url URL

`data` is a data set on the Hugging Face hub, or a JSONL file with the same columns. Only languages need `langdetect`,
and only sentences and capital words need `nltk`. The reward is 1 if all instructions are followed to the letter; the
other verdicts of the benchmark are metrics: `loose` ones also accept a reply without its first line, last line or
asterisks.
"""

import json
import re
from collections import Counter

from palaestra import Score, Task, environment
from palaestra.envs.datasets import read_rows

FOLLOWS = {}


def instruction(kind):
    """Register a function of the reply, and of the instruction's arguments, as the check of one kind."""
    return lambda check: FOLLOWS.setdefault(kind, check)


def holds(count, relation, threshold):
    return count < threshold if relation == "less than" else count >= threshold


def filled(parts):
    """Return the parts that are not blank; None if one is blank that is neither the first nor the last."""
    return None if any(not part.strip() for part in parts[1:-1]) else [part for part in parts if part.strip()]


def language_of(reply):
    import langdetect

    langdetect.DetectorFactory.seed = 0
    try:
        return langdetect.detect(reply)
    except langdetect.LangDetectException:  # a reply without letters; the benchmark lets it pass
        return None


@instruction("keywords:existence")
def has_keywords(reply, keywords):
    return all(re.search(each, reply, re.IGNORECASE) for each in keywords)


@instruction("keywords:forbidden_words")
def has_no_word(reply, forbidden_words):
    return not any(re.search(rf"\b{each}\b", reply, re.IGNORECASE) for each in forbidden_words)


@instruction("keywords:frequency")
def repeats_keyword(reply, keyword, frequency, relation):
    return holds(len(re.findall(keyword.strip(), reply, re.IGNORECASE)), relation, frequency)


@instruction("keywords:letter_frequency")
def repeats_letter(reply, letter, let_frequency, let_relation):
    return holds(reply.lower().count(letter.strip().lower()), let_relation, let_frequency)


@instruction("language:response_language")
def is_in(reply, language):
    return language_of(reply) in (language, None)


@instruction("change_case:english_capital")
def is_capital(reply):
    return reply.isupper() and is_in(reply, "en")


@instruction("change_case:english_lowercase")
def is_lowercase(reply):
    return reply.islower() and is_in(reply, "en")


@instruction("change_case:capital_word_frequency")
def has_capital_words(reply, capital_frequency, capital_relation):
    import nltk

    return holds(sum(map(str.isupper, nltk.word_tokenize(reply))), capital_relation, capital_frequency)


@instruction("length_constraints:number_sentences")
def has_sentences(reply, num_sentences, relation):
    import nltk

    return holds(len(nltk.sent_tokenize(reply)), relation, num_sentences)


@instruction("length_constraints:number_words")
def has_words(reply, num_words, relation):
    return holds(len(re.findall(r"\w+", reply)), relation, num_words)


@instruction("length_constraints:number_paragraphs")
def has_paragraphs(reply, num_paragraphs):
    found = filled(re.split(r"\s?\*\*\*\s?", reply))
    return found is not None and len(found) == num_paragraphs


@instruction("length_constraints:nth_paragraph_first_word")
def begins_paragraph(reply, num_paragraphs, nth_paragraph, first_word):
    parts = reply.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if count != num_paragraphs or nth_paragraph > count or not parts[nth_paragraph - 1].strip():
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"""[.,?!'"]""", word)[0].lower() == first_word.lower()


@instruction("detectable_content:number_placeholders")
def has_placeholders(reply, num_placeholders):
    return len(re.findall(r"\[.*?\]", reply)) >= num_placeholders


@instruction("detectable_content:postscript")
def has_postscript(reply, postscript_marker):
    marker = postscript_marker.strip()
    pattern = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(marker, marker.lower())
    return re.search(pattern, reply.lower()) is not None


@instruction("detectable_format:number_bullet_lists")
def has_bullets(reply, num_bullets):
    return sum(len(re.findall(rf"^\s*{mark}.*$", reply, re.MULTILINE)) for mark in (r"\*[^*]", "-")) == num_bullets


@instruction("detectable_format:constrained_response")
def is_one_of_three(reply):
    return any(f"My answer is {each}." in reply for each in ("yes", "no", "maybe"))


@instruction("detectable_format:number_highlighted_sections")
def has_highlights(reply, num_highlights):
    marked = re.findall(r"\*[^\n*]*\*", reply) + re.findall(r"\*\*[^\n*]*\*\*", reply)
    return sum(bool(each.strip("*").strip()) for each in marked) >= num_highlights


@instruction("detectable_format:multiple_sections")
def has_sections(reply, section_spliter, num_sections):
    return len(re.findall(rf"\s?{section_spliter.strip()}\s?\d+\s?", reply)) >= num_sections


@instruction("detectable_format:json_format")
def is_json(reply):
    text = reply.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except ValueError:
        return False
    return True


@instruction("detectable_format:title")
def has_title(reply):
    return any(each.lstrip("<").rstrip(">").strip() for each in re.findall(r"<<[^\n]+>>", reply))


@instruction("combination:two_responses")
def is_two_responses(reply):
    found = filled(reply.split("******"))
    return found is not None and len(found) == 2 and found[0].strip() != found[1].strip()


@instruction("combination:repeat_prompt")
def repeats_prompt(reply, prompt_to_repeat):
    return reply.strip().lower().startswith(prompt_to_repeat.strip().lower())


@instruction("startend:end_checker")
def ends_with(reply, end_phrase):
    return reply.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@instruction("startend:quotation")
def is_quoted(reply):
    text = reply.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


@instruction("punctuation:no_comma")
def has_no_comma(reply):
    return "," not in reply


def loosened(reply):
    """Return the replies of which a loose verdict takes the best."""
    lines = reply.split("\n")
    cut = [reply, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*cut, *(each.replace("*", "") for each in cut)]


def followed(kind, arguments, reply):
    given = {name: value for name, value in arguments.items() if value is not None}
    return bool(reply.strip()) and bool(FOLLOWS[kind](reply, **given))


@environment(toolsets=[], max_turns=1)
def ifeval(data: str = "google/IFEval"):
    for _, row in read_rows(data):
        if isinstance(row, Exception):
            raise row
        yield Task(row["key"], row["prompt"], data=[*zip(row["instruction_id_list"], row["kwargs"], strict=True)])


@ifeval.score
def follows(task, rollout):
    reply = rollout.final_response
    strict = [followed(*each, reply) for each in task.data]
    loose = [any(followed(*each, text) for text in loosened(reply)) for each in task.data]
    metrics = {"loose": float(all(loose)), "instructions": sum(strict) / len(strict)}
    metrics["instructions_loose"] = sum(loose) / len(loose)
    counted = Counter(kind for (kind, _), fine in zip(task.data, strict, strict=True) if not fine)
    return Score(float(all(strict)), metrics, {"not_followed": dict(counted)})
