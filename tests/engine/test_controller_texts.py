"""What texts one after the other teach a controller: what each takes once, how long they get, and what luck is."""

from __future__ import annotations

from forerun.engine.controller import Controller
from forerun.engine.experience import SIZES

GAINS = (0.0, 1.0, 1.0, 1.0, 1.0)
"""Of a head that drafts two tokens: there are two sizes, nothing and all."""


def write(own: Controller, text: int, steps: int, reading: float = 0.0, slower: float = 0.0, gain: float = 1.0) -> int:
    """A text of so many steps, of which each takes a little longer; how many had drafts. The first with drafts reads
    what came before it. The mean gain is given, in turns of nothing and twice as much."""
    drafted = entered = 0
    for step in range(steps):
        (limit,) = own.limits([text])
        size = 2 if limit is None else min(2, limit)
        pace = 1 + slower * step
        beside = reading if size and not entered else 0.0
        entered |= size > 0
        tokens = 1 + (int(2 * gain) if size and drafted % 2 else 0)
        drafted += size > 0
        own.observe([text], [size], [tokens], (1.5 if size else 1.0) * pace, beside=beside)
    own.forget(text)
    return drafted


def test_what_a_text_takes_once_is_not_held_against_the_rest_of_it() -> None:
    own = Controller(gains=GAINS)
    drafted = [write(own, text, 40, reading=8.0) for text in range(12)]
    assert sum(drafted) > 0.9 * 12 * 40


def test_texts_too_short_for_what_they_take_once_get_no_drafts() -> None:
    """And once they are longer, they do again."""
    own = Controller(gains=GAINS)
    drafted = [write(own, text, 4, reading=8.0) for text in range(200)]
    assert sum(count > 0 for count in drafted[50:]) < 0.02 * 150
    drafted = [write(own, text, 100, reading=8.0) for text in range(200, 220)]
    assert sum(drafted[10:]) > 0.7 * 10 * 100


def test_texts_that_grow_again_and_again_do_not_carry_times_away() -> None:
    """What was seldom taken is as slow as ever when the text is short again."""
    own = Controller(gains=GAINS)
    for text in range(40):
        write(own, text, 100, slower=0.02, gain=0.0)
    write(own, 40, 30, gain=0.0)
    plain, drafting = own.times[1].of(0), own.times[1].of(1)
    assert plain is not None
    assert drafting is not None
    assert 0.9 < plain < 1.1
    assert 1.0 <= drafting < 3.0


def wasted(texts: int, reading: float, engines: int = 1, cost: float = 1.8) -> list[float]:
    """What is lost in each of so many texts of 80 plain steps by drafts that gain too little, one engine after the
    other."""
    own, lost = Controller(gains=GAINS), [0.0] * texts
    for text in range(texts):
        if text % (texts // engines) == 0:
            own = Controller(own, GAINS)
        fresh = True
        for step in range(80):
            (limit,) = own.limits([text])
            tokens = 2 if limit != 0 and step % 10 < 3 else 1
            beside = reading if limit != 0 and fresh else 0.0
            if limit != 0:
                lost[text] += beside + cost - tokens
                fresh = False
            own.observe([text], [0 if limit == 0 else 2], [tokens], 1.0 if limit == 0 else cost, beside=beside)
        own.forget(text)
    return lost


def test_what_a_try_takes_once_is_foreseen_and_debts_are_handed_on() -> None:
    lost = wasted(40, reading=3.0, engines=40)
    assert 1 <= sum(loss > 2.0 for loss in lost[:5]) <= 2, "each engine began without a debt"
    assert sum(lost) < 0.012 * 40 * 80 + 4


def test_texts_are_tried_again_however_long_they_take_once() -> None:
    for reading, cost in ((3.0, 1.8), (20.0, 1.8), (20.0, 2.6)):
        lost = wasted(120, reading, cost=cost)
        assert sum(loss > reading for loss in lost) >= 3, "there is never enough to lose"
        assert sum(lost) < 0.015 * 120 * 80 + 6 * reading


def test_looks_at_plain_steps_are_no_debt() -> None:
    """Drafts double what three texts write; now and then a plain step is taken, and debts do not add up."""
    own, texts, plain = Controller(gains=GAINS), [0, 1, 2], 0
    for _ in range(3000):
        sizes = [2 if limit is None else min(2, limit) for limit in own.limits(texts)]
        plain += not any(sizes)
        own.observe(texts, sizes, [3 if size else 1 for size in sizes], 1.3 if any(sizes) else 1.0)
    assert 3000 // 50 < plain < 3000 // 25
    assert own.credit > -1


def test_steps_that_get_longer_with_the_text_are_no_reason_to_stop_drafting() -> None:
    """What plain decoding took behind a short text says little of what it would take behind a long one."""
    own = Controller(gains=GAINS)
    write(own, 0, 60)
    assert write(own, 1, 100, slower=0.02) >= 97


def test_bad_luck_in_the_beginning_does_not_outweigh_what_was_measured() -> None:
    own = Controller(gains=GAINS)
    unlucky = 0
    for _ in range(12):
        (limit,) = own.limits([0])
        size = 2 if limit is None else min(2, limit)
        unlucky += size > 0
        own.observe([0], [size], [1], 1.5 if size else 1.0)
    assert unlucky >= 3
    own.forget(0)
    assert write(own, 1, 60) > 30


def test_a_drafter_that_gains_nothing_is_left_whatever_was_measured() -> None:
    own, drafted, steps = Controller(gains=GAINS), 0, 400
    for text in range(10):
        drafted += write(own, text, steps // 10, gain=0.0)
    assert drafted * 0.5 < 0.03 * steps + 6
    assert SIZES[own.times[1].chosen] == 0


def test_tries_for_nothing_are_paid_for_where_they_take_longer() -> None:
    """On an accelerator a step that may draft waits for the host even where there is nothing to draft in the end. It
    says nothing of how long plain steps take."""
    own, tried, steps = Controller(gains=GAINS), 0, 1000
    for _ in range(steps):
        (limit,) = own.limits([0])
        tried += limit != 0
        own.observe([0], [0], [1], 1.0 if limit == 0 else 1.2)
    assert 10 < tried < 0.1 * steps
    assert own.times[1].of(0) == 1.0


def test_a_size_that_is_never_affordable_does_not_keep_others_from_being_tried_again() -> None:
    """First tries that seem slow, beside trees that would take as long as twenty steps."""
    own, tries, drafted = Controller(gains=(0.0, 1.0, 1.5, 2.0, 3.0)), 0, 0
    for step in range(1200):
        (limit,) = own.limits([step // 60])
        size = 60 if limit is None else limit
        tries += size > 0
        slow = 2.5 if tries <= 4 else 1.3
        seconds = {0: 1.0, 2: slow, 6: 2 * slow, 15: 12.0, 60: 40.0}[size]
        own.observe([step // 60], [size], [2 if size else 1], seconds)
        drafted += size == 2
    assert own.times[1].of(SIZES.index(None)) is None
    assert drafted > 400


def test_one_draft_and_then_nothing_is_no_debt_for_ever() -> None:
    """A size that was tried once needs a second try; but not at once at any price."""
    own, tried = Controller(gains=GAINS), 0
    for step in range(500):
        (limit,) = own.limits([0])
        found = 2 if limit != 0 and not tried else 0
        tried += limit != 0
        own.observe([0], [found], [1 + found], 1.0 if limit == 0 else 1.2)
        assert own.credit > -2.0, step
    assert tried < 0.15 * 500


def test_a_pause_while_nothing_is_found_is_not_held_against_plain_steps() -> None:
    own = Controller(gains=GAINS)
    for _ in range(40):
        (limit,) = own.limits([0])
        own.observe([0], [0], [1], 1.0, beside=0.0 if limit == 0 else 3.0)
    assert own.times[1].beside == [0.0, 0.0]


def test_where_everything_gets_slower_drafts_are_not_believed_to_stay_fast() -> None:
    """Plain steps tell at once; how long those with drafts took was seen before."""
    own, texts, pace, drafted = Controller(gains=GAINS), list(range(8)), 1.0, 0
    for step in range(240):
        if step == 200:
            pace, drafted = 1.5, 0
        sizes = [2 if limit is None else min(2, limit) for limit in own.limits(texts)]
        drafted += any(sizes)
        own.observe(texts, sizes, [1 + (size > 0) for size in sizes], (2.2 if any(sizes) else 1.0) * pace)
    assert not drafted


def test_plain_steps_that_seemed_slow_are_taken_again_with_several_texts() -> None:
    """Another program made everything slow, and was gone while drafts were chosen: without another look plain steps
    would seem slow for ever."""
    own, texts = Controller(gains=GAINS), list(range(8))

    def write_on(steps: int, pace: float) -> int:
        drafted = 0
        for _ in range(steps):
            sizes = [2 if limit is None else min(2, limit) for limit in own.limits(texts)]
            drafted += any(sizes)
            own.observe(texts, sizes, [1 + (size > 0) for size in sizes], (2.2 if any(sizes) else 1.0) * pace)
        return drafted

    assert write_on(200, 1.0) < 20, "one more token for more than twice the time"
    own.times[8].chosen = 1
    for size, seconds in ((0, 3.0), (1, 2.2)):
        for _ in range(9):
            own.times[8].add(size, seconds)
    assert write_on(100, 1.0) < 50
    assert own.times[8].chosen == 0
    assert write_on(200, 1.0) < 20
