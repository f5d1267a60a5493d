"""The search with kernels made up here: what wins, what never does, and what is told of it."""

import itertools

import pytest

from jflash.tuning.search import Kernel, TuningError, search


class Fake:
    """Kernels whose tiles are numbers: the times of their turns, how they fail, and what was asked of them."""

    def __init__(self, times, *, broken=(), wrong=(), untimed=()):
        self._times = {tiles: itertools.cycle(own) for tiles, own in times.items()}
        self._broken, self._wrong, self._untimed = broken, wrong, untimed
        self.timed: list[int] = []

    def compile(self, tiles):
        if tiles in self._broken:
            raise ValueError(f"tiles {tiles} need\n  too much")
        return tiles

    def fault(self, program):
        return f"out max: 1 ABOVE 0.5 of {program}" if program in self._wrong else None

    def time_ms(self, program):
        if program in self._untimed:
            raise RuntimeError("CUPTI saw no kernel")
        self.timed.append(program)
        return next(self._times[program])

    @property
    def kernel(self):
        return Kernel(self.compile, self.fault, self.time_ms)


def neighbours(tiles):
    return (tiles - 1, tiles + 1)


def run(fake, formula=5, candidates=neighbours, **options):
    return search(formula, candidates, fake.kernel, **{"turns": 3, "least_gain": 0.01} | options)


def by_tiles(outcome):
    return {tried.tiles: tried for tried in outcome.tried}


def test_what_is_faster_wins_and_its_neighbours_are_tried():
    outcome = run(Fake({3: [0.7], 4: [0.8], 5: [1.0], 6: [1.2]}))
    assert outcome.winner.tiles == 3
    assert outcome.gain == pytest.approx(1 / 0.7 - 1)
    assert outcome.winner.turns_ms == [0.7] * 3 and outcome.formula.turns_ms == [1.0] * 3
    assert set(by_tiles(outcome)) == {3, 4, 6} and outcome.is_complete


def test_steps_limit_how_far_it_goes():
    times = {tiles: [tiles / 10] for tiles in range(10)}
    assert run(Fake(times), steps=1).winner.tiles == 4
    assert run(Fake(times), steps=3).winner.tiles == 2


@pytest.mark.parametrize("how", ["broken", "wrong", "untimed"])
def test_what_fails_is_told_and_never_wins(how):
    outcome = run(Fake({4: [0.1], 5: [1.0], 6: [0.9]}, **{how: (4,)}), candidates=lambda tiles: (4, 6))
    assert outcome.winner.tiles == 6
    told = {"broken": "ValueError: tiles 4 need too much", "wrong": "out max: 1 ABOVE 0.5 of 4", "untimed": "saw no"}
    assert told[how] in by_tiles(outcome)[4].rejected
    assert by_tiles(outcome)[4].turns_ms == []


def test_what_fails_later_is_out():
    fake = Fake({4: [0.1], 5: [1.0], 6: [0.9]})
    left = itertools.chain([0.1, 0.1, 0.1], itertools.repeat(None))

    def time_ms(program):
        if program == 4 and next(left) is None:
            raise RuntimeError("lost")
        return fake.time_ms(program)

    outcome = search(5, lambda tiles: (4, 6), fake.kernel._replace(time_ms=time_ms), turns=3, least_gain=0.01)
    assert outcome.winner.tiles == 6
    assert by_tiles(outcome)[4].rejected == "RuntimeError: lost"


@pytest.mark.parametrize(
    "times",
    [
        # Faster in the median, but its slowest turn is no faster than the fastest of the formula's.
        [0.9, 0.9, 0.97],
        # Faster in every turn, but by less than it takes to matter.
        [0.955, 0.955, 0.955],
        [1.0],
    ],
)
def test_noise_is_no_win(times):
    outcome = run(Fake({4: times, 5: [1.0, 0.96, 0.96], 6: [1.1]}), least_gain=0.02)
    assert outcome.winner is None and outcome.gain == 0
    assert outcome.is_complete


def test_turns_are_taken_in_turn():
    fake = Fake({4: [0.9], 5: [1.0], 6: [0.8]})
    run(fake, steps=1)
    # One each to see that it can be timed, one more of the candidates, then the final: the formula, then by speed.
    assert fake.timed == [5, 4, 6, 4, 6, *[5, 6, 4] * 3]


def test_only_the_fastest_meet_the_formula():
    fake = Fake({tiles: [tiles / 10] for tiles in range(10)})
    run(fake, candidates=lambda tiles: range(9), formula=9, steps=1)
    assert set(fake.timed[-12:]) == {9, 0, 1, 2}


def test_time_that_is_up_stops_it_and_says_so():
    fake = Fake({tiles: [tiles / 10] for tiles in range(10)})
    asked = itertools.count(1)
    # Asked before each of two candidates, and each of three final turns; the second step then has no time.
    outcome = run(fake, steps=3, is_time_up=lambda: next(asked) > 5)
    assert outcome.winner.tiles == 4 and not outcome.is_complete
    assert outcome.winner.turns_ms == [0.4] * 3
    outcome = run(Fake({4: [0.1], 5: [1.0], 6: [1.0]}), is_time_up=lambda: len(fake.timed) > 0)
    assert outcome.winner is None and not outcome.is_complete and outcome.tried == ()


def test_a_win_that_does_not_last_is_none():
    """In the second step the winner of the first is timed again, beside the formula."""
    outcome = run(Fake({3: [2.0], 4: [0.8] * 6 + [1.0], 5: [1.0], 6: [1.2]}))
    assert outcome.winner is None and outcome.is_complete


def test_every_candidate_is_told_of():
    lines = []
    run(Fake({4: [0.9], 5: [1.0]}, broken=(6,)), steps=1, say=lines.append, describe=lambda tiles: f"no. {tiles}")
    assert lines[:3] == [
        "candidate 1 of 2: no. 4",
        "candidate 2 of 2: no. 6",
        "rejected: ValueError: tiles 6 need too much",
    ]
    assert lines[3:] == [f"final turn {turn} of 3" for turn in (1, 2, 3)]


@pytest.mark.parametrize("how", ["broken", "wrong", "untimed"])
def test_a_formula_that_fails_is_an_error(how):
    with pytest.raises(TuningError, match="the tiles of the formula: "):
        run(Fake({5: [1.0]}, **{how: (5,)}))


def test_an_interrupt_is_not_swallowed():
    def compile_tiles(tiles):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(5, neighbours, Fake({}).kernel._replace(compile=compile_tiles), turns=1, least_gain=0)
