"""The statistics of samples: a candidate's time, the significance of a difference, and the winner."""

from __future__ import annotations

import random
from math import inf, log

import pytest

from asel.tuning.estimates import CONFIDENCE, MAX_TIE, TIE, _t_quantile, gaps_to, trimmed_mean
from asel.tuning.scoreboard import Scoreboard


def board_of(samples: dict[int, list[float]], incumbent=None) -> Scoreboard:
    """Return a board with these samples, taken in rounds."""
    board = Scoreboard(list(samples), incumbent, 0)
    for number in range(max(map(len, samples.values()))):
        for index, taken in samples.items():
            if number < len(taken):
                board.record(index, taken[number])
    return board


def gaps_of(*samples: list[float]) -> dict:
    rounds = [dict(enumerate(taken)) for taken in zip(*samples, strict=True)]
    return gaps_to(0, dict(enumerate(samples)), rounds)


def test_late_samples_do_not_count():
    """A quarter of the samples may be arbitrarily late: a candidate's time is the mean of the others."""
    assert trimmed_mean([1.0, 1.0, 9.0]) == trimmed_mean([1.0, 1.0, 1.0, 50.0]) == 1.0
    assert trimmed_mean([0.5, 1.0, 1.5, 2.0]) == 1.0, "early ones count"
    assert trimmed_mean([0.5, 1.0, 9.0]) == 1.0, "but not of three"
    assert board_of({0: [1.1, 1.1, 1.1], 1: [1.0, 1.0, 9.0]}).leader() == 1


def test_a_slow_round_is_not_a_difference_between_candidates():
    """Ratios are taken within rounds, so a round that takes three times as long counts like any other."""
    calm = gaps_of([1.0, 1.0, 1.0, 1.0], [1.1, 1.12, 1.09, 1.11])
    busy = gaps_of([1.0, 3.0, 1.0, 2.0], [1.1, 3.36, 1.09, 2.22])
    assert busy[1].mean == pytest.approx(calm[1].mean)
    assert busy[1].margin == pytest.approx(calm[1].margin)


def test_a_disturbance_of_one_candidate_in_one_round_does_not_count():
    """Only the middle half of the ratios counts, so a late leader does not make others look fast."""
    gap = gaps_of([1.0, 1.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0], [1.1] * 7 + [9.0])[1]
    assert gap.mean == pytest.approx(log(1.1))


def test_a_dropped_candidate_is_ranked_as_if_it_had_run_in_the_later_rounds():
    """If the machine becomes three times slower after the loser is out, its own samples would look faster."""
    board = board_of({0: [1.5] * 4, 1: [1.0] * 4 + [3.0] * 12}, incumbent=0)
    board.dropped[0] = 4
    assert board.trimmed_mean(0) < board.trimmed_mean(1)
    assert board.time_beside(1, 0) == pytest.approx(1.5 * board.trimmed_mean(1))
    assert board.time_beside(1, 1) == board.trimmed_mean(1)
    board = board_of({0: [1.5], 1: [1.0, 3.0]})
    board.dropped[0] = 1
    assert board.time_beside(1, 0) == 1.5, "one round tells nothing"


def test_one_round_leaves_everything_open():
    """One sample each shows no variance; two samples each of many candidates do, by pooling."""
    one = gaps_of([1.0], [1.3], [9.0])
    assert [one[index].margin for index in (1, 2)] == [inf, inf]
    rng = random.Random(0)
    two = gaps_of(*([rng.gauss(1 + index / 10, 0.01) for _ in range(2)] for index in range(20)))
    assert two[5].lower > TIE
    assert two[1].lower < TIE


def test_of_two_candidates_a_few_rounds_leave_nearly_everything_open():
    """Two ratios that happen to agree do not prove precision."""
    assert gaps_of([1.0, 1.0], [1.5, 1.52])[1].lower < 0
    assert gaps_of([1.0] * 8, [1.5, 1.52, 1.49, 1.51] * 2)[1].lower > 0.3


def test_a_candidate_with_low_variance_has_a_smaller_margin():
    """Programs vary differently: the pooled variance is only the prior."""
    rng = random.Random(0)
    gaps = gaps_of(*([rng.gauss(1.0, sigma) for _ in range(20)] for sigma in (0.01, 0.01, 0.01, 0.2)))
    assert gaps[1].margin < gaps[3].margin / 2


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 318.3), (2, 22.33), (3, 10.21), (5, 5.893), (10, 4.144), (1000, 3.098)]
)
def test_few_degrees_of_freedom_need_many_standard_errors(degrees, expected):
    """Student's t, within a tenth of the tables, and closer with more degrees of freedom."""
    assert CONFIDENCE == 0.999
    assert _t_quantile(1, degrees) == pytest.approx(expected, rel=0.3 / degrees)


def test_the_more_are_compared_the_more_standard_errors_count_as_significant():
    """In many comparisons with the luckiest, one would look slow by chance."""
    needed = [_t_quantile(comparisons, 100) for comparisons in (1, 2, 8, 24)]
    assert needed == sorted(needed)
    assert needed[-1] > 1.25 * needed[0]


def test_a_favourite_within_the_noise_wins_and_others_tie_only_closely():
    """The incumbent gets the benefit of the doubt; other candidates win ties only."""
    wild = [0.7, 0.8, 1.0, 1.05, 1.15, 1.2, 1.4, 1.5]
    samples = {0: [1.06, 1.061] * 4, 1: [1.05, 1.051] * 4, 2: wild}
    assert board_of(samples, incumbent=0).winner() == 0
    assert board_of({**samples, 0: [1.3, 1.31] * 4}, incumbent=0).winner() == 1, "more than any noise"
    assert board_of({1: samples[2], 2: samples[1]}).winner() == 1


@pytest.mark.parametrize(("incumbent", "winner"), [(None, 1), (1, 1), (2, 2)])
def test_ties_go_to_the_incumbent_or_else_to_the_first_declared(incumbent, winner):
    assert board_of({0: [2.0] * 3, 1: [1.01] * 3, 2: [1.0] * 3}, incumbent).winner() == winner


def test_the_incumbent_loses_by_more_than_a_tie():
    assert board_of({0: [1.03] * 3, 1: [1.0] * 3}, incumbent=0).winner() == 1


def test_a_favourite_loses_to_a_large_gap_however_uncertain():
    """The benefit of the doubt is at most `MAX_TIE`."""
    board = board_of({0: [1.2, 1.5], 1: [1.0, 1.0]}, incumbent=0)
    assert board.gaps[0].lower < 0
    assert board.gaps[0].mean > MAX_TIE
    assert board.winner() == 1


def test_eliminated_candidates_do_not_come_back():
    """A loser with one sample does not tie with a leader of high variance."""
    board = board_of({0: [1.12], 1: [0.8, 1.0, 1.2, 1.4], 2: [3.0, 3.0, 3.0]}, incumbent=0)
    board.dropped = {0: 1}
    assert board.winner() == 1


def test_without_the_incumbent_the_first_declared_is_the_favourite():
    """Ties need a winner, and a candidate that is not in the race cannot be it."""
    board = Scoreboard([0, 1, 2], incumbent=1)
    assert board.favourite == 1
    board.remove(1)
    assert board.favourite == 0


def test_a_candidate_of_zero_seconds_is_the_fastest():
    """A time of zero beats any other, and ties with itself."""
    assert board_of({0: [0.5, 0.5], 1: [0.0, 0.0]}, incumbent=0).winner() == 1
    assert board_of({0: [0.0, 0.0], 1: [0.0, 0.0]}).winner() == 0


def test_a_tune_that_is_cut_short_counts_long_warm_ups():
    """If a tune ends before all were sampled, long warm-ups count as samples, and short ones do not."""
    board = Scoreboard([0, 1, 2, 3], incumbent=0)
    for index, seconds in ((0, 2.0), (0, 2.0), (1, 1.0), (2, 1e-3)):
        board.record(index, seconds)
    board.count_warmups_as_samples()
    assert board.measured == [0, 1]
    assert board.winner() == 1


def test_if_no_candidate_has_a_sample_any_warm_up_counts():
    """Even short ones, and even if some are missing: the last warm-up of each counts."""
    board = Scoreboard([0, 1, 2], incumbent=0, warmup=5)
    for index, seconds in ((0, 9e-3), (0, 2e-3), (1, 1e-3)):
        board.record(index, seconds)
    board.count_warmups_as_samples()
    assert board.samples == {0: [2e-3], 1: [1e-3]}
    assert board.winner() == 1
