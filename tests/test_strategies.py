"""Which candidate is sampled next, and who wins: plans over a board, no device anywhere."""

from __future__ import annotations

import random
from collections import Counter
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asel import InvalidRequestError, Tuner
from asel.board import LEAST_NOISE, Board, level
from asel.strategies import Drop, Exhaustive, Race, Sample


def play(strategy, draw, count, *, incumbent=None, warmup=1) -> Board:
    """Run a plan against a source of timings; `draw(index)` is one sample."""
    board = Board(list(range(count)), incumbent, warmup)
    play_on(strategy, board, draw)
    return board


def play_on(strategy, board, draw) -> None:
    for step in strategy.plan(board):
        if isinstance(step, Drop):
            board.drop(step.index, step.round, step.best)
        else:
            assert step.index not in board.dropped, "a candidate that is out is not sampled"
            board.record(step.index, draw(step.index))


def noisy(truth, sigma, seed):
    rng = random.Random(seed)
    return lambda index: truth[index] * (1 + abs(rng.gauss(0, sigma)))


def test_exhaustive_gives_everyone_the_same():
    """Each candidate gets its warm-up and its samples, one after the other, the incumbent first."""
    order = [step.index for step in _steps(Exhaustive(3), 3, incumbent=1)]
    assert order == [1] * 4 + [0] * 4 + [2] * 4


def _steps(strategy, count, seconds=1.0, **facts) -> list[Sample]:
    board, steps = Board(list(range(count)), **facts), []
    for step in strategy.plan(board):
        steps.append(step)
        board.record(step.index, seconds)
    return steps


def test_a_race_samples_every_survivor_in_turn():
    """Drift hits all alike: no candidate is two samples ahead of another that is still in."""
    board = Board(list(range(4)))
    for step in Race(iters=3).plan(board):
        if isinstance(step, Sample):
            board.record(step.index, 1.0)
            counts = [len(board.samples.get(i, ())) for i in board.alive]
            assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("number", [0, 1, 2], ids=["first pass", "second round", "third round"])
def test_the_order_of_a_round_is_shuffled_by_the_seed(number):
    """The same seed gives the same order, another seed another: in the first pass and in each round after it."""

    def order(seed, number=number):
        board = Board(list(range(8)), warmup=0)
        indices = [step.index for step in _recording(Race(iters=3, seed=seed), board)]
        return indices[8 * number : 8 * number + 8]

    assert order(1) == order(1)
    assert sorted(order(1)) == list(range(8))
    assert len({tuple(order(seed)) for seed in range(5)}) == 5
    assert order(1) != order(1, (number + 1) % 3)


def _recording(strategy, board):
    for step in strategy.plan(board):
        if isinstance(step, Sample):
            board.record(step.index, 1.0)
            yield step


def test_clear_losers_drop_out_early_and_two_always_stay():
    """Ten times slower is out after one sample; the runner-up stays to the end, however slow."""
    board = play(Race(iters=3), lambda i: [1e-3, 10e-3, 11e-3, 12e-3][i], 4)
    assert board.dropped == {2: 1, 3: 1}
    assert len(board.samples[2]) == 1
    assert len(board.samples[0]) == len(board.samples[1]) == 3


@pytest.mark.parametrize("seed", range(5))
def test_a_long_warm_up_can_be_witness_enough(seed):
    """A run of seconds is not taken twice to learn that it is slow; its warm-up is what is known of it."""
    truth = [1.0, 1.05, *[1.5] * 10]
    board = play(Race(seed=seed), lambda i: truth[i], 12)
    first = next(iter(board.warmups))  # which was sampled at once
    assert {i: number for i, number in board.dropped.items() if i != first} == {
        i: 0 for i in range(2, 12) if i != first
    }
    assert all(board.samples[i] == [1.5] for i in board.dropped)
    assert board.winner() == 0
    assert {0, 1} <= set(board.alive)


def test_a_short_warm_up_is_no_witness():
    """What a first run does only once may take milliseconds, so it says nothing of a run of microseconds."""
    warm = set()

    def draw(index):
        first = index not in warm
        warm.add(index)
        return 20e-3 if first and index == 2 else [3e-5, 2e-5, 1e-5][index]

    assert play(Race(), draw, 3).winner() == 2


def test_the_incumbent_is_never_out_at_its_warm_up():
    """It goes first, and even in a race that goes on with others around it, it is what they are held against."""
    board = Board([0, 1, 2], incumbent=2)
    for index in (0, 1):
        board.record(index, 1.0)
        board.record(index, 1.0)
    board.record(2, 9.0)
    assert not any(isinstance(step, Drop) and step.index == 2 for step in _replaying(Race(), board, 9.0))


def _replaying(strategy, board, seconds):
    for step in strategy.plan(board):
        yield step
        if isinstance(step, Sample):
            board.record(step.index, seconds)


def test_the_first_pass_goes_candidate_by_candidate():
    """Warm-up and first sample follow each other, the incumbent's before all, so that a hang later leaves them."""
    order = [step.index for step in _steps(Race(), 4, 1e-3, incumbent=2)][:8]
    assert order[:2] == [2, 2]
    assert order[::2] == order[1::2]
    assert sorted(order[::2]) == [0, 1, 2, 3]


def test_where_runs_are_long_all_are_warm_before_the_second_is_sampled():
    """The incumbent is measured at once; the others' warm-ups tell which of them are worth a sample."""
    order = [step.index for step in _steps(Race(), 4, 1.0, incumbent=2)][:8]
    assert order[:2] == [2, 2]
    assert sorted(order[2:5]) == sorted(order[5:8]) == [0, 1, 3]


def test_without_warm_ups_nobody_is_dropped_unseen():
    """What was never run cannot be too slow, however long the others take."""
    board = play(Race(), lambda i: [1.0, 1.1, 0.5, 0.4, 9.0][i], 5, warmup=0)
    assert all(board.samples[i] for i in range(5))
    assert board.winner() == 3


def test_what_is_cut_short_makes_do_with_long_warm_ups():
    """A race that ends before all were sampled still knows what a long warm-up told, and of a short one nothing."""
    board = Board([0, 1, 2, 3], incumbent=0)
    for index, seconds in ((0, 2.0), (0, 2.0), (1, 1.0), (2, 1e-3)):
        board.record(index, seconds)
    board.make_do()
    assert board.measured == [0, 1]
    assert board.winner() == 1


def test_where_nobody_has_a_sample_any_warm_up_counts():
    """Short ones too, the last of each, and however many there should have been: they are all there is."""
    board = Board([0, 1, 2], incumbent=0, warmup=5)
    for index, seconds in ((0, 9e-3), (0, 2e-3), (1, 1e-3)):
        board.record(index, seconds)
    board.make_do()
    assert board.samples == {0: [2e-3], 1: [1e-3]}
    assert board.winner() == 1


@pytest.mark.parametrize("seed", range(5))
def test_what_slows_a_whole_round_slows_nobody(seed):
    """Rounds take up to three times as long as others: what is 4% slower is still told from what is not."""
    rng, truth = random.Random(seed), [1.04e-3, 1.0e-3, 1.04e-3]
    board = Board([0, 1, 2], warmup=0)
    slow = [rng.uniform(1, 3) for _ in range(100)]
    play_on(Race(seed=seed), board, lambda i: truth[i] * slow[len(board.samples.get(i, ()))] * rng.gauss(1, 0.01))
    assert board.winner() == 1
    assert max(map(board.doubt, board.finalists)) < 0.015


@pytest.mark.parametrize("favoured", [True, False])
@pytest.mark.parametrize(("sample_s", "most"), [(1e-4, 300), (20e-3, 20), (0.5, 6)])
def test_finalists_cost_no_more_than_is_at_stake(sample_s, most, favoured):
    """Wild near-equals: short ones are sampled often, long ones only as often as they are worth.

    Where the favourite is one of them it is twice as often: a title is not kept for want of samples.
    """
    truth = [sample_s] * 4 if favoured else [9 * sample_s, *[sample_s] * 4]
    board = play(Race(), noisy(truth, 0.5, 3), len(truth))
    assert 3 <= max(map(len, board.samples.values())) <= most
    first_s = 2 * sum(truth) * 1.5
    effort_s = (1 + favoured) * max(0.6, min(first_s, 1.0), first_s / 4)
    assert board.cost_s <= first_s + 1.1 * effort_s + 12 * sample_s * 2
    if sample_s == 1e-4:
        assert board.cost_s >= effort_s, "and no less"


def test_running_that_dominates_costs_less_than_half_of_trying_all():
    """Where runs are long, a race takes fewer than two runs a candidate: ejKernel's Tuner(1, 3) takes four."""
    truth = [0.2 * (1 + 0.05 * i) for i in range(24)]
    for seed in range(20):
        board = play(Race(seed=seed), noisy(truth, 0.01, seed), 24)
        assert board.cost_s < 2 * sum(truth)
        assert truth[board.winner()] <= 1.03 * min(truth)


def test_a_race_goes_on_until_the_order_is_settled():
    """Calm timings end it after `iters` rounds; wild ones are sampled on, to the last round at most."""
    calm = play(Race(iters=3, most_rounds=20), lambda i: [1.0, 1.1][i], 2)
    assert len(calm.samples[0]) == 3
    wild = play(Race(iters=3, most_rounds=20), noisy([1e-3, 1.02e-3], 0.5, 1), 2)
    assert len(wild.samples[0]) > 10


def bridged(earlier_best, seed, new_s=1e-3) -> Board:
    """Race a new candidate with an incumbent of 4 ms, beside the best of earlier timings as a part of the latter."""
    board = Board([0, 1], 0, earlier_best=earlier_best)
    play_on(Race(), board, noisy([4e-3, new_s], 0.2, seed))
    return board


def test_a_new_candidate_is_known_as_well_as_old_timings_ask_for():
    """They are held against it by way of the incumbent: that it is clearly faster than that one is not enough."""
    off = Counter()
    for seed in range(40):
        for earlier_best in (None, 0.25):
            board = bridged(earlier_best, seed)
            off[earlier_best] += abs(board.level(1) / board.level(0) * 4 - 1)
            assert board.cost_s < 0.6 + 0.1, "however noisy it is"
    assert off[0.25] < 0.5 * off[None]


@pytest.mark.parametrize(("earlier_best", "new_s"), [(0.05, 1e-3), (0.9, 1e-3), (0.25, 8e-3)])
def test_a_new_candidate_that_is_clearly_no_rival_to_old_ones_costs_no_more(earlier_best, new_s):
    """Far slower than the best of them, or far faster; or behind the incumbent, which has been here before."""
    for seed in range(10):
        assert bridged(earlier_best, seed, new_s).cost_s < 2 * bridged(None, seed, new_s).cost_s


@pytest.mark.parametrize("level_s", [0.0, 1e-3])
def test_old_timings_of_nothing_are_nothing_to_be_told_from(level_s):
    """A timer that saw nothing of them says nothing of how far they are."""
    board = Board([0, 1], 0, earlier_best=0.0)
    play_on(Race(), board, lambda index: level_s)
    assert board.is_settled


def test_a_race_takes_far_fewer_samples_than_trying_all():
    """That is what it is for."""
    truth = [1.0 + 0.3 * i for i in range(24)]
    race = play(Race(iters=5), noisy(truth, 0.02, 1), 24)
    samples = sum(map(len, race.samples.values()))
    assert race.winner() == 0
    assert samples < 24 * 5 / 2


@pytest.mark.parametrize("incumbent", [0, 3])
def test_the_incumbent_keeps_the_title_within_the_noise(incumbent):
    """Near-equals: the incumbent wins them all, whoever was luckiest."""
    truth = [1.0, 1.004, 0.996, 1.002]
    for seed in range(20):
        assert play(Race(iters=5), noisy(truth, 0.01, seed), 4, incumbent=incumbent).winner() == incumbent


@pytest.mark.parametrize("sigma", [0.01, 0.03, 0.05])
@pytest.mark.parametrize(
    "truth", [[1.3, 1.0, 1.004, 0.997, 1.002, 1.5], [1.0, 1.01, 0.99, 1.005, 0.995, 1.0, 1.02, 1.3]]
)
@pytest.mark.parametrize("sample_s", [2e-5, 1e-3])
def test_near_equals_have_the_same_winner_nineteen_times_of_twenty(truth, sigma, sample_s):
    """Without an incumbent ties go to the first declared, so a repeated tune gives the same answer."""
    truth = [sample_s * one for one in truth]
    runs = [play(Race(seed=seed), noisy(truth, sigma, seed), len(truth)) for seed in range(60)]
    winners = Counter(board.winner() for board in runs)
    assert winners.most_common(1)[0][1] >= 57
    assert all(truth[winner] <= 1.03 * min(truth) for winner in winners)


@pytest.mark.parametrize("incumbent", [None, 1])
@pytest.mark.parametrize("count", [2, 8, 24])
def test_equals_have_the_same_winner_on_a_machine_that_others_use(count, incumbent):
    """The leader is the luckiest of all, so the more there are the farther it has to be ahead of the favourite."""
    truth, sigma = [1e-3] * count, 0.3
    runs = [play(Race(seed=seed), noisy(truth, sigma, seed), count, incumbent=incumbent) for seed in range(40)]
    assert Counter(board.winner() for board in runs)[incumbent or 0] >= 38


@given(
    truth=st.lists(st.floats(0.5, 5.0), min_size=1, max_size=12),
    sigma=st.floats(0.0, 0.05),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None)
def test_the_winner_is_never_far_from_the_best(truth, sigma, seed):
    """Whatever the timings, what wins is within the noise it was measured with of what is best."""
    board = play(Race(iters=5), noisy(truth, sigma, seed), len(truth))
    winner = board.winner()
    assert truth[winner] <= min(truth) * (1 + board.noise(winner, board.leader()) + 5 * sigma) * 1.001


def test_a_candidate_that_fails_is_out_of_every_plan():
    """What was removed from the board is not asked for again."""
    board, seen = Board([0, 1, 2]), []
    for step in Race(iters=3).plan(board):
        if isinstance(step, Sample):
            seen.append(step.index)
            if step.index == 1:
                board.remove(1)
            else:
                board.record(step.index, 1.0)
    assert seen.count(1) == 1
    assert set(board.measured) == {0, 2}


def play_until(board, seconds, fails_at) -> None:
    """Race on a board where some candidates fail: at the sample after so many that count."""
    for step in Race(iters=3).plan(board):
        if isinstance(step, Drop):
            board.drop(step.index, step.round, step.best)
        elif len(board.samples.get(step.index, ())) == fails_at.get(step.index):
            board.remove(step.index)
        else:
            board.record(step.index, seconds[step.index])


@pytest.mark.parametrize("scale", [1, 100], ids=["short", "long"])
def test_who_lost_to_one_that_fails_is_back(scale):
    """A candidate that fails late harms none of its rivals: those it had driven out race again, among themselves."""
    board, seconds = Board(list(range(6)), incumbent=0), [1.4e-3, 1e-3, 2e-3, 1.001e-3, 0.5e-3, 0.5e-3]
    play_until(board, [scale * one for one in seconds], fails_at={4: 2, 5: 2})
    assert board.winner() == 1
    assert set(board.dropped) == {2}
    assert len(board.samples[1]) == len(board.samples[3]) > 1


@pytest.mark.parametrize("seed", range(3))
def test_who_is_back_after_a_warm_up_alone_is_sampled_before_it_is_judged(seed):
    """A cold first run of 0.9 s drove out what takes 0.4; those it lost to fail, and 0.6 s do not win over it."""
    board, runs, back = Board(list(range(5)), incumbent=0), Counter(), []
    for step in Race(iters=3, seed=seed).plan(board):
        if isinstance(step, Drop):
            board.drop(step.index, step.round, step.best)
            continue
        runs[step.index] += 1
        if step.index in (3, 4) and runs[step.index] == 3:
            back.append(board.dropped.get(2))
            board.remove(step.index)
        else:
            cold = step.index == 2 and runs[2] == 1
            board.record(step.index, 0.9 if cold else [0.6, 0.61, 0.4, 0.3, 0.31][step.index])
    assert back[0] == 0, "it was driven out by its warm-up"
    assert board.winner() == 2
    assert set(board.samples[2]) == {0.4}


def test_who_lost_to_another_stays_out():
    """The failure of one that beat nobody changes nothing for those that others beat."""
    board = Board(list(range(5)), incumbent=3)
    play_until(board, [1e-3, 1.01e-3, 9e-3, 2e-3, 9e-3], fails_at={1: 2})
    assert board.dropped == {2: 1, 4: 1}
    assert len(board.samples[2]) == len(board.samples[4]) == 1


def test_when_every_finalist_fails_what_was_dropped_is_the_answer():
    """A slow time is better than none: those that drove it out are gone."""
    board = Board([0, 1, 2])
    play_until(board, [1e-3, 1e-3, 5e-3], fails_at={0: 2, 1: 2})
    assert board.winner() == 2


def test_a_strategy_is_named_or_made():
    """A name, or any object with a plan; everything else is refused by name."""
    assert Tuner(strategy=Race(iters=2)) is not None
    with pytest.raises(InvalidRequestError, match="strategy='fastest'"):
        Tuner(strategy="fastest")


def test_quick_rounds_that_agree_are_not_believed_at_once():
    """What a neighbour does to a machine lasts longer than a few short rounds, and may turn them all around."""
    seen = Counter()

    def draw(index):
        seen[index] += 1
        return 1.4e-3 if index == 0 and seen[0] <= 8 else [1e-3, 1.2e-3, 9e-3][index]

    assert play(Race(), draw, 3).winner() == 0


def test_what_is_late_for_one_of_two_is_not_early_for_the_other():
    """Rounds in which one of two finalists was disturbed say nothing of the other."""
    board = Board([0, 1], None, 0)
    for number in range(8):
        board.record(0, 2.0 if number % 4 == 0 else 1.0)
        board.record(1, 1.05)
    assert board.level(0) == pytest.approx(1.0)
    assert board.level(1) == pytest.approx(1.05)


def test_late_samples_do_not_count():
    """A quarter of the samples may be late by any amount: candidates are ranked by the mean of the others."""
    assert level([1.0, 1.0, 9.0]) == level([1.0, 1.0, 1.0, 50.0]) == 1.0
    assert level([0.5, 1.0, 1.5, 2.0]) == 1.0, "early ones count"
    assert level([0.5, 1.0, 9.0]) == 1.0, "but not of three"
    assert Board([0, 1], None, 0, {0: [1.1, 1.1, 1.1], 1: [1.0, 1.0, 9.0]}).leader() == 1


def test_what_was_dropped_does_not_come_back():
    """A loser with one sample is no equal of a leader with wild ones, however wide the noise."""
    board = Board([0, 1, 2], incumbent=0, warmup=0)
    board.samples = {0: [1.12], 1: [0.8, 1.0, 1.2, 1.4], 2: [3.0, 3.0, 3.0]}
    board.dropped = {0: 1}
    assert board.noise(1, 0) > LEAST_NOISE
    assert board.winner() == 1


def test_only_the_favourite_profits_from_noise():
    """Declared order decides among equals, not among all that wild samples cannot tell apart."""
    samples = {0: [2.0] * 5, 1: [1.06] * 5, 2: [0.94, 0.99, 1.0, 1.05, 1.2]}
    assert Board([0, 1, 2], None, 0, dict(samples)).winner() == 2
    assert Board([0, 1, 2], 1, 0, dict(samples)).winner() == 1
    assert Board([1, 2], None, 0, dict(samples)).winner() == 1  # without an incumbent, it is the first declared


def test_nobody_wins_whom_another_clearly_beats():
    """A leader that knows little of itself leaves room for the favourite, but not before a steady third one."""
    wild = [0.7, 0.8, 1.0, 1.05, 1.15, 1.2, 1.4, 1.5]
    samples = {0: [1.08, 1.081] * 4, 1: [1.0, 1.001] * 4, 2: wild}
    board = Board([0, 1, 2], 0, 0, samples)
    assert board.leader() == 2
    assert board.level(0) < board.level(2) * (1 + board.noise(0, 2)), "within the noise of the leader"
    assert board.winner() == 1
    assert Board([0, 2], 0, 0, samples).winner() == 0


def test_nothing_is_settled_as_long_as_nobody_was_sampled_twice():
    """One sample each tells nothing of their scatter, and two tell of it for all."""
    board = Board([0, 1, 2], None, 0)
    for index, seconds in enumerate((1.0, 1.3, 1.6)):
        board.record(index, seconds)
    assert board.doubt(0) == inf
    assert (board.losers(), board.is_settled) == ([], False)
    for index, seconds in enumerate((1.01, 1.3, 1.6)):
        board.record(index, seconds)
    assert 0 < board.doubt(1) < board.doubt(0) < 0.05
    assert (board.losers(), board.is_settled) == ([1, 2], True)


def test_a_steady_candidate_is_doubted_less_than_a_wild_one():
    """Programs scatter differently: what all do is only where the opinion on each begins."""
    rng = random.Random(0)
    board = Board([0, 1, 2, 3], None, 0)
    for _ in range(20):
        for index in range(4):
            board.record(index, rng.gauss(1.0, 0.2 if index == 0 else 0.01))
    assert board.doubt(1) < board.doubt(0) / 2


@pytest.mark.parametrize("first_s", [2e-3, 5e-3], ids=["a neighbour has a core", "the system took milliseconds"])
@pytest.mark.parametrize("seed", range(5))
def test_what_was_disturbed_when_it_was_first_seen_is_seen_again(seed, first_s):
    """A warm-up and a first sample follow each other, so that what disturbs the one disturbs the other."""
    seen = Counter()

    def draw(index):
        seen[index] += 1
        return first_s if index == 3 and seen[3] <= 2 else [1.2e-3, 1.3e-3, 1.4e-3, 1e-3][index]

    assert play(Race(seed=seed), draw, 4).winner() == 3


@pytest.mark.parametrize("seed", range(10))
def test_a_wild_winner_is_not_dropped_for_a_bad_start(seed):
    """A program on many threads may be the fastest on average, and the slowest of the good ones once or twice."""
    rng, truth = random.Random(seed), [1e-3, *(1.3e-3 + 2e-5 * i for i in range(12))]
    scatter = [0.2, *[0.05] * 12]
    board = play(Race(seed=seed), lambda i: truth[i] * max(0.6, rng.gauss(1, scatter[i])), 13)
    assert board.winner() == 0


def test_where_the_incumbent_failed_the_first_declared_is_the_favourite():
    """Somebody has to win ties, and what is not in the race cannot."""
    board = Board([0, 1, 2], incumbent=1)
    assert board.favourite == 1
    board.remove(1)
    assert board.favourite == 0


def test_the_incumbent_runs_to_the_end():
    """However slow it is, the incumbent is what the winner is held against, so it is never dropped."""
    board = play(Race(iters=3), lambda i: [1.0, 1.1, 5.0, 9.0][i], 4, incumbent=3)
    assert board.dropped == {2: 0}
    assert len(board.samples[3]) == 3
