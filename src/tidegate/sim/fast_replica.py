"""The replica of `sim.replica`, told without its steps: equal decisions and times, in leaps.

While a replica only decodes, nothing happens until a request finishes, the free blocks run out, or somebody asks: each
step adds a token to every sequence, so n steps take

    T(n) = n (step_s + decode_seq_s D + kv_token_s K) + kv_token_s D n (n - 1) / 2     K summed contexts, D sequences

and need as many blocks as sequences cross a block's end, which is the number of sequences of each phase (context modulo
block size) times the cycles. Such a leap is one event. It is cut where a call arrives, at the end of the step that is
under way then. Steps with a prompt in them are done one by one (`fast_steps`), at a cost that does not grow with the
sequences that decode beside it.
"""

from __future__ import annotations

from math import sqrt

from tidegate.sim.cpu_tier import CpuTierSpec
from tidegate.sim.fast_cache import Path
from tidegate.sim.fast_claims import Claims
from tidegate.sim.fast_sequences import Sequence
from tidegate.sim.fast_steps import Steps
from tidegate.sim.kernel import Kernel
from tidegate.sim.replica import ReplicaConfig
from tidegate.sim.replicas import Done, Totals
from tidegate.sim.rollout import Call, Rollout


class _Leap:
    """Decode steps planned ahead; `start_s` and `steps` count from what is settled."""

    __slots__ = ("start_s", "steps")

    def __init__(self, start_s: float, steps: int) -> None:
        self.start_s = start_s
        self.steps = steps


class FastReplica:
    def __init__(
        self,
        kernel: Kernel,
        config: ReplicaConfig,
        done: Done,
        cpu_tier: CpuTierSpec | None = None,
        *,
        releases: bool = False,
    ) -> None:
        if config.max_num_seqs > config.max_num_batched_tokens:
            raise ValueError("max_num_seqs must not be above max_num_batched_tokens, as in vLLM")
        self.config = config
        self.steps = Steps(config, cpu_tier)
        if releases:
            self.steps.cache.claims = Claims()
        self._kernel = kernel
        self._done = done
        self._size = config.block_size
        self._step_s = config.latency.step_s
        self._decode_seq_s = config.latency.decode_seq_s
        self._kv_token_s = config.latency.kv_token_s
        self._busy = False
        self._paused = False
        self._leap: _Leap | None = None

    # --- calls -------------------------------------------------------------------------------------------------
    def submit(self, call: Call) -> None:
        limit, steps = self.config.max_model_len, self.steps
        if call.prompt_tokens >= limit:
            raise ValueError(f"a prompt of {call.prompt_tokens} tokens leaves no room in {limit}")
        target = min(call.prompt_tokens + call.output_tokens, limit)
        request = Sequence(call, Path(call.rollout.context, self._size, call.rollout.id), target, self._kernel.now_s)
        steps.add(request)
        if steps.waiting[0] is request:  # else it stands behind one that does not fit: the leap holds
            self._cut_leap()
        if not self._busy and not self._paused:
            self._begin()

    def abort(self, call: Call) -> int:
        self._cut_leap()
        request = self.steps.requests.get(call.id)
        if request is None:
            return call.output_tokens
        call.cached_tokens = request.cached_tokens
        generated = self.steps.decoding.tokens(request) - call.prompt_tokens
        self.steps.remove(request)
        return generated

    def generated(self, call: Call) -> int:
        self._settle(self._begun())
        request = self.steps.requests.get(call.id)
        return call.output_tokens if request is None else self.steps.decoding.tokens(request) - call.prompt_tokens

    # --- what a monitor sees -----------------------------------------------------------------------------------
    def totals(self) -> Totals:
        self._settle(self._begun())
        steps = self.steps
        return Totals(
            running=steps.running,
            waiting=len(steps.waiting),
            prompt_tokens=steps.prompt_tokens,
            cached_tokens=steps.cached_tokens,
            generation_tokens=steps.generation_tokens,
            preemptions=steps.preemptions,
            recomputed_tokens=steps.recomputed_tokens,
            used_blocks=steps.cache.used,
            evicted_blocks=steps.cache.evictions,
        )

    def resident_tokens(self, rollout: Rollout) -> int:
        self._settle(self._begun())
        steps, context = self.steps, rollout.context
        blocks, _ = steps.cache.hit(Path(context, self._size), context.reach_tokens // self._size)
        request = steps.requests.get(rollout.call.id) if rollout.call is not None else None
        if request is not None and self.config.enable_prefix_caching and request.decoding:
            # What it generates is booked when it ends.
            blocks = max(blocks, (steps.decoding.tokens(request) - 1) // self._size)
        return blocks * self._size

    def resident_blocks(self) -> int:
        self._settle(self._begun())
        return self.steps.cache.resident

    # --- control -----------------------------------------------------------------------------------------------
    def release(self, rollout: Rollout) -> None:
        self._settle(self._begun())
        self.steps.cache.release(rollout.id)

    def flush(self) -> None:
        self._cut_leap()
        self.steps.preempt_all()
        self.steps.cache.reset()
        if self.steps.tier is not None:
            self.steps.tier.clear()

    def pause(self) -> None:
        self._cut_leap()
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        if not self._busy:
            self._begin()

    # --- time --------------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        """The next step, or leap, begins now."""
        steps = self.steps
        self._busy = not self._paused and steps.has_work
        if not self._busy:
            return
        ahead = steps.steps_ahead()
        if ahead:
            leap = self._leap = _Leap(self._kernel.now_s, ahead)
            self._kernel.after(self._leap_s(ahead), self._end_leap, leap)
            return
        batch = steps.step()
        while batch.empty and batch.preempted:  # all room was wanted by one that gave it up
            batch = steps.step()
        if batch.empty:
            self._busy = False
            return
        duration_s = self.config.latency.step_time_s(
            batch.prefill_tokens, batch.pairs, batch.decodes, batch.context_tokens, len(batch.chunks)
        )
        self._kernel.after(duration_s + batch.restore_s, self._end, batch.finished)

    def _end(self, finished: list[Sequence]) -> None:
        for request in finished:
            call = request.call
            call.cached_tokens = request.cached_tokens
            call.output_tokens = request.target - call.prompt_tokens
            self._done(call)
        self._begin()

    # --- leaps -------------------------------------------------------------------------------------------------
    def _leap_s(self, steps: int) -> float:
        decoding = self.steps.decoding
        sequences = decoding.count
        first_s = self._step_s + self._decode_seq_s * sequences + self._kv_token_s * decoding.context_tokens
        return steps * first_s + self._kv_token_s * sequences * (steps * (steps - 1) / 2)

    def _end_leap(self, leap: _Leap) -> None:
        if leap is self._leap:  # else it was cut
            self._settle(leap.steps)
            self._leap = None
            self._end(self.steps.take_finished())

    def _begun(self) -> int:
        """How many more steps of the leap have begun by now than are settled."""
        leap = self._leap
        if leap is None:
            return 0
        elapsed_s = self._kernel.now_s - leap.start_s
        if elapsed_s < 0.0 or not leap.steps:
            return 0
        steps = min(leap.steps, int(self._steps_within(elapsed_s)) + 1)
        while steps > 1 and self._leap_s(steps - 1) > elapsed_s:
            steps -= 1
        while steps < leap.steps and self._leap_s(steps) <= elapsed_s:
            steps += 1
        return steps

    def _steps_within(self, elapsed_s: float) -> float:
        """T(n) = elapsed, solved for n."""
        decoding = self.steps.decoding
        half = self._kv_token_s * decoding.count / 2
        first_s = self._step_s + self._decode_seq_s * decoding.count + self._kv_token_s * decoding.context_tokens
        linear = first_s - half
        if half <= 0.0 or linear <= 0.0:
            return elapsed_s / first_s if first_s > 0.0 else 0.0
        return 2 * elapsed_s / (linear + sqrt(linear * linear + 4 * half * elapsed_s))

    def _settle(self, steps: int) -> None:
        """Book these steps of the leap."""
        leap = self._leap
        if leap is not None and steps:
            leap.start_s += self._leap_s(steps)
            leap.steps -= steps
            self.steps.decode(steps)

    def _cut_leap(self) -> None:
        """What is asked for now happens after the step under way."""
        leap = self._leap
        if leap is not None:
            self._settle(self._begun())
            self._leap = None
            self._kernel.at(max(leap.start_s, self._kernel.now_s), self._end, self.steps.take_finished())
