"""Print as JSON what the helpers of atroposlib return; under ours, `palaestra.compat` is imported first."""

import json
import logging
import sys

from atroposlib.envs.eval import pass_at_k
from atroposlib.envs.reward_fns import CombinedReward, RewardFunction, registry
from atroposlib.utils.advantages import compute_grpo_process_supervision_advantages, compute_stats
from atroposlib.utils.best_of_n_selection import select_best_index
from atroposlib.utils.message_history_utils import ensure_trajectory_token_limit, strip_thinking, truncate_thinking
from atroposlib.utils.metrics import get_std_min_max_avg
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from atroposlib.utils.tool_call_parser import extract_tool_call, parse_tool_call

logging.disable()

CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"at": 3}}}
CHATS = [
    [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "It is 3."}],
    [
        {"role": "system", "content": "Think inside <think> tags. é 日本"},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "tool_call_id": "c", "name": "look"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is 4.", "reward": None},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes.<|im_end|>"},
    ],
]
REPLIES = [
    '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>',
    "<tool_call>{'name': 'look'}</tool_call> <tool_call>{}</tool_call>",
    '<tool_call>{"name": "gone"}</tool_call>',
    "<tool_call>[1]</tool_call>",
    "<tool_call>{</tool_call>",
    "<tool_call></tool_call>",
    "none",
]
THOUGHTS = [
    "x<think>\none\n\ntwo two\n\nend\n</think>\ny",
    "<think>abcdef ghi</think>y",
    "x <think> </think> y",
    "<think>a\n\n</think>",
    "no thinking",
    "</think>late<think>",
]


class LengthReward(RewardFunction):
    def compute(self, completions, **kwargs):
        return [float(len(self.get_content(each))) for each in completions]


class BrokenReward(RewardFunction):
    def compute(self, completions, **kwargs):
        raise ValueError("no")


def rewards():
    registry.register(LengthReward)
    registry.register(BrokenReward)
    said = [
        "a",
        {"role": "assistant", "content": "abc"},
        {"message": {"role": "assistant", "content": "<Think>x</think>"}},
    ]
    said += [[{"role": "user"}, {"role": "assistant", "content": "<answer>\n</answer>"}], 3]
    parts = ["length", {"type": "format", "weight": 3.0, "params": {"require_all_tags": False}}, "broken"]
    yield registry.create("length", weight=0.5)(said)
    yield registry.create({"type": "broken"})(said)
    for normalization in ("none", "sum", "minmax"):
        combined = CombinedReward(parts, normalization=normalization, weight=2.0)
        yield [combined.name, combined(said), combined.compute([])]


def steps(tokenizer):
    for turns, limit in ((4, 60), (4, 80), (6, 90), (2, 10), (3, 1000)):
        chat = [{"role": "system", "content": "s"}]
        for turn in range(turns):
            chat += [{"role": "environment", "content": f"o{turn}"}, {"role": "agent", "content": f"a{turn}" * 3}]
        longer = [*chat, {"role": "environment", "content": "last"}]
        rows = [tokenize_for_trainer(tokenizer, each) for each in (chat, longer)]
        step = {"seed": 1, "messages": [chat, longer], "scores": [0, 1], "parsed_actions": [0, 1]}
        step.update({key: [row[key] for row in rows] for key in ("tokens", "masks")})
        yield ensure_trajectory_token_limit([step, {"messages": []}], tokenizer, limit)


def found(tokenizer):
    yield (
        "rows",
        [
            tokenize_for_trainer(tokenizer, chat, messages, turns, reason)
            for chat in CHATS
            for messages in (False, True)
            for turns in (False, True)
            for reason in ("", "stop", "length")
        ],
    )
    yield (
        "texts",
        [
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
            for chat in CHATS
            for prompt in (False, True)
        ],
    )
    yield "open", tokenizer.apply_chat_template(CHATS[0], tokenize=False, continue_final_message=True)
    names = [f"{name}_token{ending}" for name in ("bos", "eos", "pad", "unk") for ending in ("", "_id")]
    yield "special", {name: getattr(tokenizer, name) for name in names}
    yield "sizes", [len(tokenizer), tokenizer.vocab_size, len(tokenizer.get_vocab())]
    yield (
        "ids",
        [tokenizer.encode("a<|im_end|> b"), tokenizer("a b")["input_ids"], tokenizer(["a", "b c"])["input_ids"]],
    )
    yield "tokens", [tokenizer.tokenize("a b"), tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.decode([5])]
    yield "calls", [parse_tool_call(each, [{"name": "look"}]) for each in REPLIES]
    yield "any calls", [parse_tool_call(each) for each in REPLIES]
    yield "tags", [extract_tool_call("<a> 1 </a><b>2</b>", tags) for tags in (None, ["a"], ["c", "b"])]
    yield "stripped", [strip_thinking(each) for each in THOUGHTS[:5]]
    yield "truncated", [truncate_thinking(each, tokenizer, most) for each in THOUGHTS for most in (0, 1, 3, 100)]
    yield "steps", list(steps(tokenizer))
    yield "rewards", list(rewards())
    yield "stats", compute_stats([1, [2.5, [3]]])
    yield "spread", {key: float(value) for key, value in get_std_min_max_avg("t", [1.0, 3.0, 8.0], {}).items()}
    for gamma in (None, 0.5):
        rows = compute_grpo_process_supervision_advantages([[1.0, 2.0], [3.0]], gamma)
        yield f"advantages {gamma}", [[round(float(each), 5) for each in row] for row in rows]
    yield "pass", [round(float(pass_at_k(5, right, k)), 9) for right in range(6) for k in range(1, 6)]
    scores = [[1, 2, 2, 2], [5, 9, 3, 3]]
    yield "best", [select_best_index(*scores, high, low) for high in (True, False) for low in (True, False)]


def main(folder):
    try:
        from palaestra_contract.chat_tokenizer import ChatTokenizer
        from palaestra_tokens.tokenizers import load_tokenizer
    except ImportError:
        from transformers import AutoTokenizer, PreTrainedTokenizerBase

        newer = PreTrainedTokenizerBase.apply_chat_template

        def older(self, *given, return_dict=False, **named):
            """Return ids, as before release 5 of transformers, for which atroposlib was written."""
            return newer(self, *given, return_dict=return_dict, **named)

        PreTrainedTokenizerBase.apply_chat_template = older
        tokenizer = AutoTokenizer.from_pretrained(folder)
    else:
        tokenizer = ChatTokenizer(load_tokenizer(folder))
    print(json.dumps(dict(found(tokenizer))))


if __name__ == "__main__":
    main(sys.argv[1])
