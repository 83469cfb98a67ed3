"""A Gaussian process over config fields, in numpy: what is known near a config, and how well."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asel.tuning.search.config_fields import ConfigFields

__all__ = ["GaussianProcess", "Prediction"]

Numbers = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

# Priors of the logarithms that are fitted: a field's weight in squared distances, shared by all fields, for ordered
# values and for equal ones; and the part of the variance that is noise. Wide: a few tens of measurements outvote them.
_ORDER_WEIGHT = 2.0
_ALIGNMENT_WEIGHT = 0.5
_EQUALITY_WEIGHT = 0.6
_NOISE = 3e-3
_PRIOR_SPREAD = 1.5
# Rprop's steps, in logarithms.
_FIRST_STEP = 0.3
_MAX_STEP = 1.0


class Prediction(NamedTuple):
    """What is expected of some configs, and its standard deviation."""

    means: Numbers
    deviations: Numbers


class GaussianProcess:
    """A Matern 5/2 kernel over ordered fields and equality, a weight for each, fitted to the data.

    Ordered fields count twice, by distance and by equality, since a field of numbers may be a mere list of methods.
    """

    def __init__(self, fields: ConfigFields) -> None:
        self._fields = fields
        # An embedding in which squared distances are the kernel's: a column for each number and for each value.
        levels = fields.codes.max(axis=0, initial=0) + 1 if len(fields) else np.zeros(0, np.int64)
        self._one_hot = [np.eye(count)[fields.codes[:, i]] * 2**-0.5 for i, count in enumerate(levels)]
        numbers, equal = fields.numbers.shape[1], len(self._one_hot)
        ordered = sum(fields.ordered)
        count = max(equal, 1)
        weights = [_ORDER_WEIGHT] * ordered + [_ALIGNMENT_WEIGHT] * (numbers - ordered) + [_EQUALITY_WEIGHT] * equal
        self._prior = np.log(np.array([*(np.array(weights) / count), _NOISE]))
        self._fitted = self._prior.copy()
        self._rows: Rows = np.zeros(0, np.int64)

    def fit(self, rows: Rows, targets: Numbers, steps: int) -> None:
        """Take what was measured; spend `steps` evaluations of the likelihood on better weights.

        Raises:
            LinAlgError: the measurements contradict each other, which the noise term rules out in exact arithmetic.
        """
        pairs = self._pairs(rows)
        if steps:
            self._improve_weights(pairs, targets, steps)
        kernel, _ = self._kernel(pairs @ np.exp(self._fitted[:-1]))
        kernel[np.diag_indices(len(rows))] += np.exp(self._fitted[-1])
        inverse = np.linalg.inv(np.linalg.cholesky(kernel))
        self._rows, self._inverse = rows, inverse.T @ inverse
        ones = self._inverse.sum(axis=1)
        self._centre = (ones @ targets) / ones.sum()
        residual = targets - self._centre
        self._weights = self._inverse @ residual
        self._variance = max(float(residual @ self._weights) / len(rows), 1e-12)

    def predict(self, rows: Rows) -> Prediction:
        """Return what is expected of some configs, by the last fit."""
        kernel, _ = self._kernel(self.apart(rows, self._rows))
        means = self._centre + kernel @ self._weights
        known = ((kernel @ self._inverse) * kernel).sum(axis=1)
        return Prediction(means, np.sqrt(np.maximum(1 - known, 1e-9) * self._variance))

    def apart(self, rows: Rows, others: Rows) -> Numbers:
        """Return the squared distances of some configs to others, by the last fit."""
        one, other = self._place(rows), self._place(others)
        squared: Numbers = (one**2).sum(axis=1)[:, None] + (other**2).sum(axis=1) - 2 * one @ other.T
        return np.maximum(squared, 0)

    def _place(self, rows: Rows) -> Numbers:
        scale = np.exp(self._fitted[:-1] / 2)
        numbers = self._fields.numbers.shape[1]
        columns = [self._fields.numbers[rows] * scale[:numbers]]
        columns += [one[rows] * by for one, by in zip(self._one_hot, scale[numbers:], strict=True)]
        return np.concatenate(columns, axis=1)

    def _pairs(self, rows: Rows) -> Numbers:
        """Return the squared distance of each pair of configs in each column."""
        numbers, codes = self._fields.numbers[rows], self._fields.codes[rows]
        near = (numbers[:, None] - numbers[None]) ** 2
        return np.concatenate([near, codes[:, None] != codes[None]], axis=2)

    @staticmethod
    def _kernel(apart: Numbers) -> tuple[Numbers, Numbers]:
        """Return the kernel of some squared distances, and its derivative by them."""
        root = np.sqrt(5 * apart)
        decay = np.exp(-root)
        return (1 + root + root * root / 3) * decay, -(5 / 6) * (1 + root) * decay

    def _improve_weights(self, pairs: Numbers, target: Numbers, steps: int) -> None:
        """Follow the signs of the likelihood's gradient, keeping the best (resilient propagation)."""
        at, step = self._fitted, np.full(len(self._prior), _FIRST_STEP)
        before, best = np.zeros(len(self._prior)), np.inf
        for _ in range(steps):
            loss, gradient = self._loss(at, pairs, target)
            if loss < best:
                best, self._fitted = loss, at
            turned = gradient * before < 0
            step = np.where(turned, step / 2, np.where(gradient * before > 0, np.minimum(step * 1.3, _MAX_STEP), step))
            before = np.where(turned, 0, gradient)
            at = np.clip(at - np.sign(before) * step, self._prior - 4 * _PRIOR_SPREAD, self._prior + 4 * _PRIOR_SPREAD)

    def _loss(self, at: Numbers, pairs: Numbers, target: Numbers) -> tuple[float, Numbers]:
        """Return the negative logarithm of likelihood and prior, up to a constant, and its gradient."""
        count, weights, noise = len(target), np.exp(at[:-1]), np.exp(at[-1])
        kernel, slope = self._kernel(pairs @ weights)
        kernel[np.diag_indices(count)] += noise
        lower = np.linalg.cholesky(kernel)
        half = np.linalg.inv(lower)
        inverse = half.T @ half
        ones = inverse.sum(axis=1)
        residual = target - (ones @ target) / ones.sum()
        solved = inverse @ residual
        variance = max(float(residual @ solved) / count, 1e-12)
        off = (at - self._prior) / _PRIOR_SPREAD
        loss = count * np.log(variance) / 2 + np.log(np.diag(lower)).sum() + off @ off / 2
        by_kernel = (inverse - np.outer(solved, solved) / variance) / 2
        by_weight = (by_kernel * slope).ravel() @ pairs.reshape(count * count, -1) * weights
        return float(loss), np.append(by_weight, np.trace(by_kernel) * noise) + off / _PRIOR_SPREAD
