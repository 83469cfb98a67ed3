"""Opens, warms up and closes a selector with a Starlette or FastAPI application, and answers its probes.

tuned = SelectorLifespan(selector, [(kernel, (example,)), ...])
app = FastAPI(lifespan=tuned, routes=tuned.routes())
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import anyio

from asel.kernels.call_text import call_text
from asel.redaction import redact
from asel.runtime.jax_settings import current_settings
from asel.runtime.threads import run_in_thread
from asel.selection.policy import tuning_switched_off
from asel.serving.batch import example_calls
from asel.serving.batch_run import BatchCall, run_batch
from asel.serving.executor import Executor
from asel.serving.preparation import own_prepare

try:
    from starlette.responses import JSONResponse
    from starlette.routing import BaseRoute, Route
except ImportError as error:
    raise ImportError('asel.integrations.starlette needs starlette: pip install "asel[starlette]"') from error

if TYPE_CHECKING:
    from starlette.requests import Request

    from asel.selection.selector import ConfigSelectorChain
    from asel.serving.batch_summary import BatchProgress

__all__ = ["Readiness", "SelectorLifespan"]

logger = logging.getLogger("asel")
Examples = Iterable[tuple[Any, Any]]
Status = Literal["closed", "warming up", "ready", "degraded"]
# The number of calls that a probe's answer names, since people read it and the orchestrator stores it.
_MAX_NAMED = 50


@dataclass(frozen=True, slots=True)
class Readiness:
    """The progress of the warm-up, for probes."""

    status: Status
    """`degraded`: the warm-up is over, and some calls run on their heuristics or fail."""
    total: int = 0
    missing: tuple[str, ...] = ()
    """The calls that are not settled yet."""
    failed: dict[str, str] = field(default_factory=dict)
    """The calls that are settled without a tuned config, each with the reason."""
    error: str = ""
    """The error that ended the warm-up early, if any."""

    @property
    def is_ready(self) -> bool:
        """Whether the service is ready for requests: every call is settled, some perhaps by an error."""
        return self.status in ("ready", "degraded")

    def as_dict(self) -> dict[str, Any]:
        """Return the answer to a probe, with long lists cut short."""
        failed = dict(list(self.failed.items())[:_MAX_NAMED])
        answer: dict[str, Any] = {"status": self.status, "total": self.total, "settled": self.total - len(self.missing)}
        answer |= {"missing": list(self.missing[:_MAX_NAMED])} if self.missing else {}
        answer |= {"failed": failed} if failed else {}
        return answer | ({"error": self.error} if self.error else {})


class SelectorLifespan:
    """Opens a selector with an application, warms it up while the application serves, and closes it at the end.

    The server answers from the start, since the warm-up is a task of its own: meanwhile `/livez` is 200 and `/readyz`
    is 503, with the missing examples. Once every example is settled, `/readyz` is 200. It names the examples that
    failed or run on their heuristics, with the reasons.

    `examples` are those of `warm_up`, or a function that returns them, which is called in a thread. An example with
    arrays is run once, so that no request has to compile it. After `budget_s` no more tunes begin.

    The application's state has the `selector` and its `Executor`, as `request.state.execute`.
    """

    def __init__(
        self,
        selector: ConfigSelectorChain[Any, Any],
        examples: Examples | Callable[[], Examples] = (),
        *,
        budget_s: float | None = None,
    ) -> None:
        self.selector = selector
        self._examples = examples
        self._budget_s = budget_s
        self._status: Status = "closed"
        self._forget()

    def _forget(self) -> None:
        self._total = 0
        self._missing: list[str] = []
        self._failed: dict[str, str] = {}
        self._error = ""

    @asynccontextmanager
    async def __call__(self, app: Any = None) -> AsyncIterator[dict[str, Any]]:
        """Keep the selector open for an application; yields the application's state."""
        self._forget()
        try:
            async with self.selector, anyio.create_task_group() as tasks:
                execute: Executor[Any, Any] = Executor(self.selector)
                self._status = "warming up"
                tasks.start_soon(self._warm_up, execute)
                try:
                    yield {"selector": self.selector, "execute": execute}
                finally:
                    tasks.cancel_scope.cancel()
        finally:
            self._status = "closed"

    def readiness(self) -> Readiness:
        """Return the progress of the warm-up; may be called from any thread."""
        return Readiness(self._status, self._total, tuple(self._missing), dict(self._failed), self._error)

    def routes(self, live: str = "/livez", ready: str = "/readyz") -> list[BaseRoute]:
        """Return the routes of both probes."""
        return [Route(live, self.live, name="asel.live"), Route(ready, self.ready, name="asel.ready")]

    async def live(self, request: Request) -> JSONResponse:
        """Answer 200: the event loop answers, so the service is alive, warm or not."""
        return JSONResponse({"status": "alive"})

    async def ready(self, request: Request) -> JSONResponse:
        """Answer 200 once the service is ready for requests, and 503 before, with the missing examples."""
        readiness = self.readiness()
        return JSONResponse(readiness.as_dict(), 200 if readiness.is_ready else 503)

    async def _warm_up(self, execute: Executor[Any, Any]) -> None:
        try:
            calls = await run_in_thread("making examples", partial(self._calls, current_settings()))
            names = [f"{call.kernel.op_id}({call_text(call.inv, call.kernel)})" for call in calls]
            self._total, self._missing = len(names), list(names)
            begun, on_heuristic = "", set[str]()

            def note(progress: BatchProgress) -> None:
                nonlocal begun
                begun = progress.begun or begun
                if (item := progress.ended) is None:
                    return
                if item.outcome == "failed":
                    self._settle(begun, item.said())
                elif item.outcome == "heuristic":
                    on_heuristic.add(begun)
                elif item.outcome == "left":
                    self._settle(f"{item.op_id}({item.call})", f"the budget of {self._budget_s:g} s was already spent")

            await run_batch(self.selector, calls, progress=note, budget_s=self._budget_s)
            for name, call in zip(names, calls, strict=True):
                if name in self._missing:
                    failure = await _failure_of_running(execute, call)
                    self._settle(name, failure or (await self._why_heuristic(call) if name in on_heuristic else ""))
        except Exception as error:  # the application serves anyway, and `/readyz` has the error
            logger.exception("the warm-up failed")
            self._error = f"{type(error).__name__}: {redact(error)}"
        self._missing.clear()
        self._status = "degraded" if self._failed or self._error else "ready"

    async def _why_heuristic(self, call: BatchCall) -> str:
        """Return why a call that may be tuned runs on its heuristic; "" if tuning is off."""
        if not self.selector.policy.allow_autotune or tuning_switched_off():
            return ""
        inv = call.inv if call.prepare is None else await call.prepare()
        explanation = await self.selector.explain(inv, call.kernel)
        says = next(answer.says for answer in explanation.tiers if answer.tier == "autotune")
        return f"runs on its heuristic: {redact(says)}"

    def _calls(self, settings: Any) -> list[BatchCall]:
        examples = self._examples() if callable(self._examples) else self._examples
        return example_calls(examples, settings)

    def _settle(self, name: str, failure: str = "") -> None:
        if name in self._missing:
            self._missing.remove(name)
        if failure:
            self._failed[name] = failure


async def _failure_of_running(execute: Executor[Any, Any], call: BatchCall) -> str:
    """Run an example once, so that its program is compiled; return why that failed, or ""."""
    import jax

    if call.prepare is None and own_prepare(call.kernel) is not None:
        return ""  # the invocation's arguments are prepared already, and the executor would prepare them again
    leaves = jax.tree_util.tree_leaves((call.inv.args, call.inv.kwargs))
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return ""
    timeout_s = execute.selector.policy.candidate_timeout_s
    try:
        with anyio.fail_after(timeout_s):
            await execute(call.kernel, *call.inv.args, **call.inv.kwargs)
    except TimeoutError:
        return f"its run takes longer than {timeout_s:g} s"
    except Exception as error:
        return f"{type(error).__name__}: {redact(error)}"
    return ""
