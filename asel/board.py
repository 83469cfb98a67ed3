"""What a tune has sampled so far, and what that says: who leads, who is out of it, and whether more would change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import hypot, inf, log, sqrt
from statistics import fmean, median, median_low

__all__ = ["JITTER_S", "LEAST_NOISE", "LONG_S", "Board", "level"]

# Two levels closer than this are a tie, however calm the samples look.
LEAST_NOISE = 0.02
# Where samples scatter, so much is a tie for anyone: what it may cost is bounded by what a choice may cost.
MOST_TIE = 0.03
# And farther apart than this they are none even for the favourite: a guess is not kept at any price.
MOST_NOISE = 0.1
# What is clear is so by so many standard errors. It is asked again and again, and one is too few for that.
SURE = 2.0
# Levels known as well as this are not sampled on: a winner that ties by twice that is the same next time.
PRECISE = 0.005
# What the system takes from a run now and then, whatever its length: long samples are precise, short ones are not.
JITTER_S = 5e-3
# A run this long has its one-off costs behind it in a small part of it, so that even the first one tells something.
LONG_S = 50e-3
# What all candidates' samples say of the scatter of one weighs as much as so many samples of its own.
PRIOR = 3
# With so many samples, twice as much is in doubt as their scatter shows: they are late in bunches, and asked often.
FEW = 3
# Normal samples' standard deviation by their mean deviation.
NORMAL = 1.25
# A sample that is late by more than this part of a level says no more of its scatter than one that is late by this.
MOST_LATE = 0.5
# So many rounds are needed to tell what slowed a round from what is slow.
LEAST_ROUNDS = 3
# What a sample costs at the least: handing it over, and repeating a short run until a timer can see it.
LEAST_COST_S = 1e-3


def level(samples: Sequence[float]) -> float:
    """Return the mean of the fastest three quarters: samples are late, now and then by much, and seldom early.

    Steadier than a median, which knows but one sample, or a minimum, which is the luckiest. Of three it is the middle
    one: the fastest quarter of so few is luck.
    """
    late = (len(samples) + 1) // 4
    early = late if len(samples) < 4 else 0
    return fmean(sorted(samples)[early : len(samples) - late])


@dataclass(slots=True)
class Board:
    """What has been sampled so far. `warmup` samples of each candidate are taken and not counted."""

    candidates: list[int]
    incumbent: int | None = None
    warmup: int = 1
    samples: dict[int, list[float]] = field(default_factory=dict)
    warmups: dict[int, list[float]] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    rounds: list[dict[int, float]] = field(default_factory=list)
    """The samples again, those together that were taken in one round."""
    cost_s: float = 0.0
    """What sampling has taken."""
    earlier_best: float | None = None
    """The best that an earlier tune knows of others, as a part of what it knows of the incumbent."""
    _lost_to: dict[int, int | None] = field(default_factory=dict)
    _paired: dict[int, list[float]] | None = None
    _compared: int = 0  # how many of these are freed of what slowed their rounds
    _scatter: float | None = None
    _levels: dict[int, tuple[float, float]] = field(default_factory=dict)

    def record(self, index: int, seconds: float, cost_s: float = 0.0) -> None:
        """Note a sample, and what it took to get it: more than it says, where it is one of many runs."""
        self.cost_s += max(seconds, cost_s, LEAST_COST_S)
        warm = self.warmups.setdefault(index, [])
        if len(warm) < self.warmup:
            warm.append(seconds)
        else:
            self.samples.setdefault(index, []).append(seconds)
            if not self.rounds or index in self.rounds[-1]:
                self.rounds.append({})
            self.rounds[-1][index] = seconds
            self._has_changed()

    def is_warm(self, index: int) -> bool:
        return len(self.warmups.get(index, ())) >= self.warmup

    def drop(self, index: int, number: int, best: int | None = None) -> None:
        """Take a candidate out of the race, which it lost to `best` in round `number`.

        Where it has only been warmed up, that is all that is known of it.
        """
        self.dropped[index] = number
        self._lost_to[index] = best
        self._make_do(index)
        self._has_changed()

    def make_do(self) -> None:
        """End here: long warm-ups count for those that have not come further, and any where nobody has."""
        nothing_else = not self.measured
        for index in self.alive:
            if self.is_long(index) or (nothing_else and self.warmups.get(index)):
                self._make_do(index)
        self._has_changed()

    def _make_do(self, index: int) -> None:
        self.samples.setdefault(index, self.warmups.get(index, [])[-1:])

    def is_long(self, index: int) -> bool:
        """Tell whether a candidate had a warm-up, and even that says something of it."""
        return bool(self.warmups.get(index)) and self.is_warm(index) and self.witness(index) >= LONG_S

    def witness(self, index: int) -> float:
        """Return the best that was seen of a candidate, its warm-up included."""
        return min((*self.samples.get(index, ()), *self.warmups.get(index, ())), default=inf)

    def remove(self, index: int) -> None:
        """Forget a candidate that failed; those that lost to it are back in the race."""
        if index in self.candidates:
            self.candidates.remove(index)
        self.samples.pop(index, None)
        for loser in [loser for loser, best in self._lost_to.items() if best == index]:
            if self.dropped.pop(loser) == 0:
                del self.samples[loser]  # which was but its warm-up
            del self._lost_to[loser]
        self._has_changed()

    def enter(self, candidates: Sequence[int]) -> None:
        """Have these in the race, and no others."""
        self.candidates = list(candidates)
        self._has_changed()

    def _has_changed(self) -> None:
        self._paired = self._scatter = None
        self._levels.clear()

    @property
    def alive(self) -> list[int]:
        return [index for index in self.candidates if index not in self.dropped]

    @property
    def measured(self) -> list[int]:
        """The candidates with a sample that counts, dropped or not."""
        return [index for index in self.candidates if self.samples.get(index)]

    def median(self, index: int) -> float:
        return median(self.samples[index])

    def level(self, index: int) -> float:
        """Return what a candidate is ranked by."""
        return self._known(index)[0]

    def doubt(self, index: int) -> float:
        """Return how well a level is known: its standard error as a fraction of it, and more where samples are few.

        They show less scatter than there is, so that of all candidates' samples counts too. Infinite as long as
        nobody was sampled twice.
        """
        return self._known(index)[1]

    def _known(self, index: int) -> tuple[float, float]:
        if index not in self._levels:
            taken = self._taken()
            if self._scatter is None:
                known = sum(len(samples) - 1 for samples in taken.values())
                self._scatter = sum(map(_deviations, taken.values())) / known if known else inf
            samples = taken[index]
            count = len(samples)
            scatter = (PRIOR * self._scatter + _deviations(samples)) / (PRIOR + count - 1)
            # What slowed a round is told by its samples, so they scatter around that less than around the truth.
            shown = 1 - 1 / self._compared if self._compared else 1.0
            self._levels[index] = level(samples), NORMAL * scatter / sqrt(count * shown) * (1 + FEW / count)
        return self._levels[index]

    def _taken(self) -> dict[int, list[float]]:
        """Return the samples, those of the finalists freed of what slowed a whole round.

        They scatter half as much then. Needs rounds in which all of them ran.
        """
        if self._paired is None:
            self._paired, self._compared = {i: samples for i, samples in self.samples.items() if samples}, 0
            racing = [i for i in self.finalists if any(i in samples for samples in self.rounds)]
            rounds = [samples for samples in self.rounds if all(i in samples for i in racing)]
            if len(rounds) >= LEAST_ROUNDS and len(racing) > 1:
                freed = _freed(rounds, racing)
                self._paired |= freed
                self._compared = len(freed)
        return self._paired

    def noise(self, one: int, other: int) -> float:
        """Return how far apart two levels may be and still be a tie for the favourite, as a fraction.

        Whoever leads is the luckiest of all finalists: the more there are, the farther it is ahead of its equals. That
        it is by more than this happens once in two hundred tunes.
        """
        rivals = max(len(self.finalists) - 1, 1)
        return min(max(LEAST_NOISE, (2.58 + 0.29 * log(rivals)) * self._reach(one, other)), MOST_NOISE)

    def tie(self, one: int, other: int) -> float:
        """Return the same for two of which neither is the favourite: more than a choice may cost is no tie."""
        return min(LEAST_NOISE + 1.5 * self._reach(one, other), MOST_TIE)

    def _reach(self, one: int, other: int) -> float:
        doubt = self._doubt(one, other)
        return doubt if doubt < inf else 0.0  # where nothing tells, what was seen is all there is

    @property
    def finalists(self) -> list[int]:
        """The measured candidates that are still in; where all of those have failed, what was dropped for them."""
        return [i for i in self.measured if i not in self.dropped] or self.measured

    def leader(self) -> int:
        """Return the finalist with the lowest level."""
        return min(self.finalists, key=self.level)

    def winner(self) -> int:
        """Return the favourite where no finalist beats it by more than the noise, else the first declared of equals.

        Of those beaten by nobody by more than a tie, that is: never more than `MOST_TIE`, since of many, one that is
        somewhat slower always looks like an equal. What was dropped was clearly slower, and cannot come back on the
        strength of few samples.
        """
        leader = self.leader()
        return next(i for i in self._by_preference() if i == leader or self._is_as_good(i))

    def _is_as_good(self, index: int) -> bool:
        return all(self._over(index, other) <= self._allowed(index, other) for other in self.finalists)

    def losers(self) -> list[int]:
        """Return the finalists that are clearly too slow to win."""
        leader = self.leader()
        return [i for i in self.finalists if i != leader and self._is_slower(i, leader)]

    @property
    def is_settled(self) -> bool:
        """Whether more samples would hardly change the winner, or would not matter.

        Whichever of the others were the best, the winner would clearly cost no more than a tie may; and those
        that would be preferred to it are clearly too slow. Or as much of that as is asked is known precisely.
        """
        leader, winner = self.leader(), self.winner()
        if not self._is_told_from_earlier(leader):
            return False
        preferred = self._by_preference()
        asked = [(winner, index) for index in preferred if index != winner]
        asked += [(index, leader) for index in preferred[: preferred.index(winner)]]
        return all(self._is_equal(*pair) or self._is_slower(*pair) or self._doubt(*pair) <= PRECISE for pair in asked)

    def _is_told_from_earlier(self, leader: int) -> bool:
        """Whether the leader is clearly ahead of what was timed earlier or behind it, by way of the incumbent."""
        incumbent, best = self.incumbent, self.earlier_best
        if best is None or incumbent is None or leader == incumbent or incumbent not in self.finalists:
            return True
        best_s, doubt = self.level(incumbent) * best, self._doubt(leader, incumbent)
        return abs(self.level(leader) - best_s) > (MOST_TIE + SURE * doubt) * best_s or doubt <= PRECISE

    def _is_equal(self, index: int, best: int) -> bool:
        return self._over(index, best) + SURE * self._doubt(index, best) <= MOST_TIE

    def _is_slower(self, index: int, best: int) -> bool:
        return self._over(index, best) - SURE * self._doubt(index, best) > self._allowed(index, best)

    def _over(self, index: int, best: int) -> float:
        """Return by how much one is slower than the other, as a fraction."""
        level_s, best_s = self.level(index), self.level(best)
        return level_s / best_s - 1 if best_s > 0 else 0.0 if level_s == best_s else inf

    def _allowed(self, index: int, best: int) -> float:
        return self.noise(best, index) if index == self.favourite else self.tie(best, index)

    def _doubt(self, one: int, other: int) -> float:
        return hypot(self.doubt(one), self.doubt(other))

    def _by_preference(self) -> list[int]:
        return sorted(self.finalists, key=lambda index: (index != self.incumbent, index))

    @property
    def favourite(self) -> int:
        """The candidate that wins every tie: the incumbent, or else the first declared."""
        return self.incumbent if self.incumbent in self.candidates else min(self.candidates)


def _freed(rounds: Sequence[dict[int, float]], racing: Sequence[int]) -> dict[int, list[float]]:
    """Return the samples without what slowed their rounds; none where the timer has seen nothing of some.

    A round is slowed by as much as half of those that ran in it: of two it is the one that was slowed less, or what
    is late for one of them would be early for the other.
    """
    usual = {i: level([samples[i] for samples in rounds]) for i in racing}
    if min(usual.values()) <= 0:
        return {}
    slowed = [median_low(samples[i] / usual[i] for i in racing) for samples in rounds]
    if min(slowed) <= 0:
        return {}
    return {i: [samples[i] / by for samples, by in zip(rounds, slowed, strict=True)] for i in racing}


def _deviations(samples: Sequence[float]) -> float:
    """Return by how much samples differ from their median, as fractions of it, all together."""
    middle = median(samples)
    if middle <= 0:
        return 0.0
    return sum(min(abs(seconds / middle - 1), MOST_LATE) for seconds in samples)
