"""A tokamax op with configs for every platform; tokamax's own ops have them only for accelerators."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pydantic
import tokamax
from jaxtyping import Array, Float


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The number of rows in a block."""

    rows: pydantic.PositiveInt


@dataclasses.dataclass(frozen=True)
class BlockedScale(tokamax.Op[Any, jax.Array, None, Rows, Any]):
    """Multiplies a matrix by a number, one block of rows after the other."""

    config_cls: ClassVar[type[Rows]] = Rows
    supports_batched_args_capture: ClassVar[bool] = False
    bias: float = 0.0

    def _fwd(
        self, x: Float[Array, "..."], *, factor: float, return_residuals: bool, config: Rows
    ) -> tuple[jax.Array, None]:
        blocks = x.reshape(-1, config.rows, x.shape[1])
        return jax.lax.map(lambda block: block * factor + self.bias, blocks).reshape(x.shape), None

    def _get_heuristics_config(self, ba: Any) -> Rows:
        return Rows(rows=ba.arguments["x"].shape[0])

    def _get_autotuning_configs(self, ba: Any) -> set[Rows]:
        return {Rows(rows=rows) for rows in (1, 2, 4)}


class GpuScale(BlockedScale):
    """The same for GPUs only, like most of tokamax's own ops."""

    def supported_on(self, device: jax.Device) -> bool:
        return device.platform == "gpu"


x = jnp.arange(16.0).reshape(8, 2)
