"""The engine: a simulated replica that runs in real or scaled time.

Model time is the clock's time multiplied by `time_scale`. A step begun at model time t ends at t + duration, and its
tokens are delivered when the clock gets there. Timers are coarse (a millisecond is 50 ms at scale 50), so `_pump`
runs all steps that are due, each beginning exactly where the one before ended; a request joins the first step that
begins after its arrival, also when that step is run late. When the process cannot keep up, or was not given the CPU for
more than `MAX_LAG_S`, the model clock is set back by what is missing instead of rushing through steps in which nobody
could have sent anything; how much, in all, is exported, so that a measurement can be told to be worthless.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable

from tidegate.engine import tokenizer
from tidegate.engine.config import EngineConfig
from tidegate.engine.generation import Generation, Sampling
from tidegate.engine.hashing import PromptHashes
from tidegate.engine.plugin import PluginEngine
from tidegate.engine.request_metrics import RequestMetrics
from tidegate.engine.sglang_sessions import OpenSessions
from tidegate.sim.blocks import BlockEvent
from tidegate.sim.replica import PauseMode, Replica, StepResult

MAX_LAG_S = 0.1  # of the clock: longer than a busy event loop takes, shorter than a client would notice
PUMP_SLICE_S = 0.002  # of the clock, in one go: connections are served between slices

BlockEventSink = Callable[[list[BlockEvent], dict[str, Generation]], None]


class EngineCore:
    def __init__(self, config: EngineConfig, on_block_events: BlockEventSink | None = None) -> None:
        self.config = config
        self.replica = Replica(config.replica())
        self.plugin = PluginEngine(self.replica) if config.plugin else None
        self.metrics = RequestMetrics(config.model_len)
        self.sessions = OpenSessions()  # SGLang's
        self.draining = False
        self.alive = True
        self.sleep_level: int | None = None
        self.slipped_s = 0.0  # clock seconds by which model time was set back
        self.steps = 0
        self._generations: dict[str, Generation] = {}
        self._hashes = PromptHashes(config.block_size)
        self._on_block_events = on_block_events
        self._serial = itertools.count()  # of sequences
        self._fresh = itertools.count()  # of replies that no seed was given for
        self._loop = asyncio.get_running_loop()
        self._origin_s = self._loop.time()
        self._arrivals: deque[Generation] = deque()
        self._step: StepResult | None = None
        self._step_end_s = 0.0
        self._timer: asyncio.Handle | None = None
        self._drained = asyncio.Event()  # nobody is unfinished
        self._idle = asyncio.Event()  # no step is due: nothing to do, or paused
        self._idle.set()

    # --- time -------------------------------------------------------------------------------------------------
    def now_s(self) -> float:
        """Model time."""
        return (self._loop.time() - self._origin_s) * self.config.time_scale

    # --- requests ---------------------------------------------------------------------------------------------
    @property
    def unfinished(self) -> int:
        return len(self._generations)

    @property
    def running(self) -> int:
        return len(self.replica.running)

    @property
    def waiting(self) -> int:
        return len(self.replica.waiting) + len(self._arrivals)

    def submit(
        self,
        prompt: bytes,
        sampling: Sampling,
        *,
        id: str,
        choice: int = 0,
        salt: str | None = None,
        session: str | None = None,
        priority: int = 0,
        chat: bool = False,
        streaming: bool = False,
        changed: asyncio.Event | None = None,
    ) -> Generation:
        """Begin to generate. `id` is the client's and need not be unique. The prompt has at least one token and leaves
        room for one in the model's length."""
        hashes = self._hashes.of(prompt, salt, session) if self.config.enable_prefix_caching else []
        generation = Generation(
            f"{id}#{next(self._serial)}",
            prompt,
            hashes,
            sampling,
            reply_key=self._reply_key(prompt, sampling, choice),
            mean_output_tokens=self.config.mean_output_tokens,
            limit_tokens=self.config.model_len - tokenizer.count(prompt),
            block_size=self.config.block_size,
            salt=salt,
            bare_first=chat,
            streaming=streaming,
            changed=changed,
            session=session,
            priority=priority,
            arrival_s=self.now_s(),
        )
        if self.draining:
            generation.finish_reason = "abort"
            self._end(generation, generation.arrival_s)
            return generation
        self._generations[generation.id] = generation
        self._arrivals.append(generation)
        self._wake()
        return generation

    def _reply_key(self, prompt: bytes, sampling: Sampling, choice: int) -> bytes:
        draw = f"{self.config.seed}/"
        if sampling.temperature > 0:
            fresh = sampling.seed if sampling.seed is not None else f"#{next(self._fresh)}"
            draw += f"{sampling.temperature}/{fresh}/{choice}"
        return draw.encode() + b"\n" + prompt

    def abort(self, id: str, *, counted: bool = False) -> bool:
        """End a request with what it has; its token of the step under way is lost. vLLM counts the engine's own aborts
        (pause, shutdown), not those that clients ask for."""
        generation = self._generations.get(id)
        if generation is None:
            return False
        if self.replica.abort(id) is None:
            self._arrivals = deque(waiting for waiting in self._arrivals if waiting.id != id)
        generation.finish_reason = "abort"
        self._end(generation, self.now_s(), counted=counted)
        self._flush_block_events()
        self._wake()
        return True

    def abort_all(self, *, counted: bool = False) -> int:
        return sum(1 for id in list(self._generations) if self.abort(id, counted=counted))

    def matching(self, id: str) -> list[str]:
        """Internal ids of a request's sequences."""
        return [known for known in self._generations if known.startswith((f"{id}#", f"{id}-"))]

    # --- control ----------------------------------------------------------------------------------------------
    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Returns when the pause is complete: with `wait`, when the running requests have ended."""
        if mode == "abort":
            self.abort_all(counted=True)
        self.replica.pause(mode)
        self._wake()
        await self._idle.wait()
        if clear_cache:
            self.reset_prefix_cache(reset_running_requests=True)

    def resume(self) -> None:
        self.replica.resume()
        self._wake()

    async def sleep(self, level: int, mode: PauseMode) -> None:
        await self.pause(mode, clear_cache=level >= 1)
        self.sleep_level = level

    def wake_up(self) -> None:
        self.sleep_level = None
        self.resume()

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        done = self.replica.reset_prefix_cache(reset_running_requests=reset_running_requests)
        if done and self.plugin is not None:
            self.plugin.reset()
        return done

    async def drain(self, timeout_s: float) -> None:
        """New requests are answered with an abort; running ones may end within the timeout, then they are aborted."""
        self.draining = True
        if timeout_s > 0 and self._generations:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    self._drained.clear()
                    await self._drained.wait()
        self.abort_all(counted=True)

    def close(self) -> None:
        self.draining = True
        self.abort_all()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- the loop ---------------------------------------------------------------------------------------------
    def _wake(self) -> None:
        if self._timer is None:
            self._idle.clear()
            self._timer = self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        try:
            self._run_due_steps()
        except Exception:
            self.alive = False  # /health says so, and nobody waits for ever
            self.close()
            raise

    def _run_due_steps(self) -> None:
        self._timer = None
        slice_end_s = self._loop.time() + PUMP_SLICE_S
        while True:
            now_s = self._catch_up()
            if self._step is not None:
                if self._step_end_s > now_s:
                    self._timer = self._loop.call_later((self._step_end_s - now_s) / self.config.time_scale, self._pump)
                    return
                self._deliver(self._step, self._step_end_s)
                self._step = None
            begin_s = self._begin_s(now_s)
            if begin_s is None:
                self._idle.set()
                return
            step = self.replica.step(begin_s)
            self._flush_block_events()
            self.steps += 1
            self._step, self._step_end_s = step, begin_s + step.duration_s
            if self._loop.time() > slice_end_s:
                self._timer = self._loop.call_soon(self._pump)
                return

    def _catch_up(self) -> float:
        now_s = self.now_s()
        if self._step is not None:
            lag_s = (now_s - self._step_end_s) / self.config.time_scale
            if lag_s > MAX_LAG_S:
                self.slipped_s += lag_s
                self._origin_s += lag_s
                now_s = self._step_end_s
                for generation in self._arrivals:
                    generation.arrival_s = min(generation.arrival_s, now_s)
        return now_s

    def _begin_s(self, now_s: float) -> float | None:
        """When the next step begins, with the requests in it that have arrived by then. None: nothing to do."""
        begin_s = self._step_end_s
        if not self.replica.has_work:
            if not self._arrivals:
                return None
            begin_s = max(begin_s, self._arrivals[0].arrival_s)
        while self._arrivals and self._arrivals[0].arrival_s <= begin_s:
            self.replica.add(self._arrivals.popleft())
        if self.replica.has_work:
            return begin_s
        return None  # paused: they wait in the queue

    def _deliver(self, step: StepResult, at_s: float) -> None:
        self.metrics.step(step.prefill_tokens + step.decode_seqs)
        for request in step.outputs:
            assert isinstance(request, Generation)
            if request.done:
                continue  # aborted while the step ran
            request.delivered += 1
            self.metrics.token(request, at_s)
            if request.streaming:
                request.changed.set()
        for request in step.finished:
            assert isinstance(request, Generation)
            if not request.done:
                self._end(request, at_s)

    def _end(self, generation: Generation, at_s: float, *, counted: bool = True) -> None:
        self._generations.pop(generation.id, None)
        generation.done = True
        generation.changed.set()
        if not self._generations:
            self._drained.set()
        if counted:
            self.metrics.ended(generation, at_s)

    def _flush_block_events(self) -> None:
        if self._on_block_events is not None:
            events = self.replica.take_events()
            if events:
                self._on_block_events(events, self._generations)
