"""Requests that share one model in one thread: who joins, who leaves, and that everybody is answered exactly once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palaestra_slots.core.errors import EngineUnavailable
from palaestra_tokens.engine import Sampled
from palaestra_tokens.engines.batcher import Batcher
from palaestra_tokens.engines.sampling import Sampling

PATIENCE_S = 20.0


class Counting:
    """A decoder whose rows count on from the last token of their prompt; it steps when `steps` lets it."""

    def __init__(self) -> None:
        self.steps: threading.Semaphore | None = None
        self.rows: list[int] = []
        self.loaded = ""
        self.fails: Exception | None = None
        self.stepped = threading.Semaphore(0)
        self.most = 1000

    def room(self, prompts: Sequence[Sequence[int]]) -> int:
        return min(len(prompts), self.most - len(self.rows))

    def admit(self, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]) -> None:
        self.rows += [prompt[-1] for prompt in prompts]

    def step(self) -> list[tuple[int, float]]:
        if self.steps is not None:
            assert self.steps.acquire(timeout=PATIENCE_S)
        if self.fails is not None:
            raise self.fails
        self.rows = [row + 1 for row in self.rows]
        self.stepped.release()
        return [(row, -row / 8) for row in self.rows]

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def load(self, folder: str) -> None:
        assert not self.rows
        if folder == "missing":
            raise FileNotFoundError(folder)
        self.loaded = folder


@contextmanager
def batcher(decoder: Counting, **options: int) -> Iterator[Batcher]:
    made = Batcher(lambda: decoder, name="counting", **options)
    made.start().result(PATIENCE_S)
    try:
        yield made
    finally:
        decoder.steps = None
        made.close()


def count_on(sampled: Sampled, start: int, tokens: int) -> None:
    wanted = list(range(start + 1, start + 1 + tokens))
    assert (list(sampled.ids), list(sampled.logprobs)) == (wanted, [-row / 8 for row in wanted])


def test_requests_that_come_together_are_one_batch() -> None:
    decoder = Counting()
    decoder.steps = threading.Semaphore(0)
    with batcher(decoder) as running:
        answers = [running.submit([start], Sampling(), 3) for start in (10, 20, 30)]
        decoder.steps.release(100)
        for start, answer in zip((10, 20, 30), answers, strict=True):
            count_on(answer.result(PATIENCE_S), start, 3)
    assert running.most_at_once == 3


def test_requests_for_which_the_decoder_has_no_room_wait_in_order() -> None:
    decoder = Counting()
    decoder.most = 2
    with batcher(decoder) as running:
        answers = [running.submit([start], Sampling(), 3) for start in (10, 20, 30, 40, 50)]
        for start, answer in zip((10, 20, 30, 40, 50), answers, strict=True):
            count_on(answer.result(PATIENCE_S), start, 3)
    assert running.most_at_once == 2


def test_each_ends_for_its_own_reason_and_the_others_go_on() -> None:
    with batcher(Counting()) as running:
        stops = running.submit([1], Sampling(stop_ids=frozenset({4})), 50)
        runs_out = running.submit([1], Sampling(), 6)
        assert (stops.result(PATIENCE_S).finish_reason, list(stops.result().ids)) == ("stop", [2, 3, 4])
        assert (runs_out.result(PATIENCE_S).finish_reason, len(runs_out.result().ids)) == ("length", 6)


def test_a_newcomer_joins_between_two_tokens() -> None:
    decoder = Counting()
    decoder.steps = threading.Semaphore(2)
    with batcher(decoder) as running:
        first = running.submit([100], Sampling(), 10)
        assert decoder.stepped.acquire(timeout=PATIENCE_S)
        assert decoder.stepped.acquire(timeout=PATIENCE_S)
        second = running.submit([5], Sampling(), 1)
        decoder.steps.release(100)
        count_on(second.result(PATIENCE_S), 5, 1)
        count_on(first.result(PATIENCE_S), 100, 10)
    assert running.most_at_once == 2


def test_a_request_that_was_taken_back_leaves_the_batch() -> None:
    decoder = Counting()
    decoder.steps = threading.Semaphore(1)
    with batcher(decoder) as running:
        lost = running.submit([100], Sampling(), 1_000_000)
        assert decoder.stepped.acquire(timeout=PATIENCE_S)
        assert lost.cancel()
        decoder.steps.release(100)
        count_on(running.submit([5], Sampling(), 2).result(PATIENCE_S), 5, 2)
        assert decoder.rows == [] or decoder.rows[0] < 100, "a million tokens later it would still be there"
        with pytest.raises(CancelledError):
            lost.result()


def test_no_more_rows_than_allowed_and_first_come_first_served() -> None:
    decoder = Counting()
    decoder.steps = threading.Semaphore(0)
    done: list[int] = []

    def note(number: int) -> Callable[[Future[Sampled]], None]:
        return lambda _: done.append(number)

    with batcher(decoder, most_rows=2) as running:
        answers = [running.submit([number], Sampling(), 2) for number in range(6)]
        for number, answer in enumerate(answers):
            answer.add_done_callback(note(number))
        decoder.steps.release(1000)
        for number, answer in enumerate(answers):
            count_on(answer.result(PATIENCE_S), number, 2)
    assert done == sorted(done)
    assert running.most_at_once == 2


def test_a_failure_hits_the_batch_and_not_what_comes_after() -> None:
    decoder = Counting()
    decoder.fails = EngineUnavailable("out of memory")
    with batcher(decoder) as running:
        unlucky = running.submit([1], Sampling(), 3)
        with pytest.raises(EngineUnavailable, match="out of memory"):
            unlucky.result(PATIENCE_S)
        decoder.fails = None
        count_on(running.submit([1], Sampling(), 3).result(PATIENCE_S), 1, 3)


def test_new_weights_abort_what_is_under_way_with_what_it_has() -> None:
    decoder = Counting()
    decoder.steps = threading.Semaphore(0)
    with batcher(decoder) as running:
        cut = running.submit([10], Sampling(), 100)
        decoder.steps.release(3)
        for _ in range(3):
            assert decoder.stepped.acquire(timeout=PATIENCE_S)
        loaded = running.load("weights-1", "one")
        decoder.steps.release(1000)
        sampled = cut.result(PATIENCE_S)
        loaded.result(PATIENCE_S)
        assert (sampled.finish_reason, sampled.policy_version, decoder.loaded) == ("abort", "0", "weights-1")
        count_on(sampled, 10, len(sampled.ids))
        assert 3 <= len(sampled.ids) <= 4, "the step under way may be finished first"
        after = running.submit([*[10], *sampled.ids], Sampling(), 2).result(PATIENCE_S)
        assert after.policy_version == "one"
        with pytest.raises(FileNotFoundError):
            running.load("missing", "two").result(PATIENCE_S)
        assert running.submit([1], Sampling(), 1).result(PATIENCE_S).policy_version == "one"


def test_closing_answers_everybody_and_can_be_done_twice() -> None:
    decoder = Counting()
    decoder.steps = threading.Semaphore(0)
    with batcher(decoder, most_rows=1) as running:
        answers = [running.submit([1], Sampling(), 5), running.submit([2], Sampling(), 5)]
        closing = threading.Thread(target=running.close)
        closing.start()
        decoder.steps.release(1)
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
        for answer in answers:
            with pytest.raises(EngineUnavailable, match="closed"):
                answer.result(PATIENCE_S)
        with pytest.raises(EngineUnavailable, match="closed"):
            running.submit([1], Sampling(), 1)


def test_a_model_that_cannot_be_made_says_so_to_everybody() -> None:
    def make() -> Counting:
        raise RuntimeError("no such model")

    running = Batcher(make, name="broken")
    early = running.submit([1], Sampling(), 1)
    with pytest.raises(RuntimeError, match="no such model"):
        running.start().result(PATIENCE_S)
    with pytest.raises(EngineUnavailable, match="no such model"):
        early.result(PATIENCE_S)
    running.close()


def test_closing_what_was_never_started() -> None:
    Batcher(Counting, name="idle").close()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 12), st.booleans()), max_size=20), st.integers(1, 5))
def test_whatever_comes_everybody_gets_their_own_tokens(wanted: list[tuple[int, int, bool]], most_rows: int) -> None:
    with batcher(Counting(), most_rows=most_rows) as running:
        answers = [running.submit([start], Sampling(), tokens) for start, tokens, _ in wanted]
        for answer, (_, _, taken_back) in zip(answers, wanted, strict=True):
            if taken_back:
                answer.cancel()
        for answer, (start, tokens, _) in zip(answers, wanted, strict=True):
            if not answer.cancelled():
                count_on(answer.result(PATIENCE_S), start, tokens)
    assert running.most_at_once <= most_rows
