"""The replica of `sim.replica`, told without its steps: equal decisions and times, in leaps.

While a replica only decodes, nothing happens until a request finishes, the free blocks run out, or somebody asks: each
step adds a token to every sequence, so n steps take

    T(n) = n (step_s + decode_seq_s D + kv_token_s K) + kv_token_s D n (n - 1) / 2     K summed contexts, D sequences

and need as many blocks as sequences cross a block's end, which is the number of sequences of each phase (context modulo
block size) times the cycles. Such a leap is one event. It is cut where a call arrives, at the end of the step that is
under way then. Steps with a prompt in them are done one by one, at a cost that does not grow with the sequences that
decode beside it; only a step that preempts looks at each of them. First come, first served only.
"""

from __future__ import annotations

from collections import deque
from math import sqrt

from tidegate.sim.cpu_tier import CpuTier, CpuTierSpec
from tidegate.sim.fast_cache import FastCache, Path
from tidegate.sim.fast_sequences import Sequence, Sequences
from tidegate.sim.kernel import Event, Kernel
from tidegate.sim.replica import ReplicaConfig
from tidegate.sim.replicas import Done, Totals
from tidegate.sim.rollout import Call, Rollout


class _Leap:
    """Decode steps planned ahead; `start_s` and `steps` count from what is settled."""

    __slots__ = ("event", "start_s", "steps")

    def __init__(self, start_s: float, steps: int) -> None:
        self.start_s = start_s
        self.steps = steps
        self.event: Event | None = None


class FastReplica:
    def __init__(self, kernel: Kernel, config: ReplicaConfig, done: Done, cpu_tier: CpuTierSpec | None = None) -> None:
        if config.scheduling_policy != "fcfs":
            raise ValueError("the fast replica serves first come, first served; take the exact one")
        if config.max_num_seqs > config.max_num_batched_tokens:
            raise ValueError("max_num_seqs must not be above max_num_batched_tokens, as in vLLM")
        self.config = config
        self.cache = FastCache(config.num_blocks)
        self.tier = CpuTier(cpu_tier, config.block_size) if cpu_tier is not None else None
        self._kernel = kernel
        self._done = done
        self._size = config.block_size
        self._waiting: deque[Sequence] = deque()
        self._requests: dict[int, Sequence] = {}
        self._prefilling: Sequence | None = None  # at most one is amid its prompt, and it was admitted last
        self._decoding = Sequences(config.block_size)
        self._orders = 0
        self._busy = False
        self._paused = False
        self._leap: _Leap | None = None
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generation_tokens = 0
        self._preemptions = 0
        self._recomputed_tokens = 0

    # --- calls -------------------------------------------------------------------------------------------------
    def submit(self, call: Call) -> None:
        config = self.config
        if call.prompt_tokens >= config.max_model_len:
            raise ValueError(f"a prompt of {call.prompt_tokens} tokens leaves no room in {config.max_model_len}")
        target = min(call.prompt_tokens + call.output_tokens, config.max_model_len)
        request = Sequence(call, Path(call.rollout.context, self._size), target)
        self._requests[call.id] = request
        if not self._waiting:  # else it stands behind one that does not fit: the leap holds
            self._cut_leap()
        self._waiting.append(request)
        self._wake()

    def abort(self, call: Call) -> int:
        self._cut_leap()
        request = self._requests.pop(call.id, None)
        if request is None:
            return call.output_tokens
        call.cached_tokens = request.cached_tokens
        generated = self._decoding.tokens(request) - call.prompt_tokens
        if request in self._decoding:
            self._leave(request)
        elif request is self._prefilling:
            self._prefilling = None
        else:
            self._waiting.remove(request)
        self.cache.free(request.path)
        return generated

    def generated(self, call: Call) -> int:
        self._settle(self._begun())
        request = self._requests.get(call.id)
        return call.output_tokens if request is None else self._decoding.tokens(request) - call.prompt_tokens

    # --- what a monitor sees -----------------------------------------------------------------------------------
    def totals(self) -> Totals:
        self._settle(self._begun())
        return Totals(
            running=len(self._decoding) + (self._prefilling is not None),
            waiting=len(self._waiting),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=self._preemptions,
            recomputed_tokens=self._recomputed_tokens,
            used_blocks=self.cache.used,
            evicted_blocks=self.cache.evictions,
        )

    def resident_tokens(self, rollout: Rollout) -> int:
        self._settle(self._begun())
        context = rollout.context
        blocks, _ = self.cache.hit(Path(context, self._size), context.reach_tokens // self._size)
        request = self._requests.get(rollout.call.id) if rollout.call is not None else None
        if request is not None and self.config.enable_prefix_caching and request in self._decoding:
            # What it generates is booked when it ends.
            blocks = max(blocks, (self._decoding.tokens(request) - 1) // self._size)
        return blocks * self._size

    def resident_blocks(self) -> int:
        self._settle(self._begun())
        return self.cache.resident

    # --- control -----------------------------------------------------------------------------------------------
    def flush(self) -> None:
        self._cut_leap()
        while self._prefilling is not None or len(self._decoding):
            self._preempt(self._newest())
        self.cache.reset()
        if self.tier is not None:
            self.tier.clear()

    def pause(self) -> None:
        self._cut_leap()
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._wake()

    # --- time --------------------------------------------------------------------------------------------------
    def _wake(self) -> None:
        if not self._busy and not self._paused:
            self._begin()

    def _begin(self) -> None:
        """The next step, or leap, begins now."""
        self._busy = not self._paused and bool(self._waiting or len(self._decoding) or self._prefilling)
        if not self._busy:
            return
        if self._prefilling is None and len(self._decoding) and not self._head_fits():
            steps = self._decoding.steps_ahead(self.cache.num_free)
            if steps:
                self._start_leap(steps)
                return
        self._do_step()

    def _start_leap(self, steps: int) -> None:
        leap = self._leap = _Leap(self._kernel.now_s, steps)
        leap.event = self._kernel.after(self._leap_s(steps), self._end_leap)

    def _leap_s(self, steps: int) -> float:
        latency, sequences = self.config.latency, len(self._decoding)
        first_s = latency.step_time_s(0, 0.0, sequences, self._decoding.context_tokens)
        return steps * first_s + latency.kv_token_s * sequences * (steps * (steps - 1) / 2)

    def _end_leap(self) -> None:
        leap = self._leap
        assert leap is not None
        self._settle(leap.steps)
        self._leap = None
        self._end(self._finished())

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
        latency, sequences = self.config.latency, len(self._decoding)
        half = latency.kv_token_s * sequences / 2
        linear = latency.step_time_s(0, 0.0, sequences, self._decoding.context_tokens) - half
        if half <= 0.0 or linear <= 0.0:
            first_s = linear + half
            return elapsed_s / first_s if first_s > 0.0 else 0.0
        return 2 * elapsed_s / (linear + sqrt(linear * linear + 4 * half * elapsed_s))

    def _settle(self, steps: int) -> None:
        """Book these steps of the leap."""
        leap = self._leap
        if leap is None or not steps:
            return
        leap.start_s += self._leap_s(steps)
        leap.steps -= steps
        self.cache.claim(self._decoding.blocks_needed(steps))
        self._advance(steps)

    def _advance(self, steps: int) -> None:
        self._decoding.advance(steps)
        self._generation_tokens += steps * len(self._decoding)

    def _cut_leap(self) -> None:
        """What is asked for now happens after the step under way."""
        leap = self._leap
        if leap is None:
            return
        self._settle(self._begun())
        assert leap.event is not None
        leap.event.cancel()
        self._leap = None
        finished = self._finished()
        self._kernel.at(max(leap.start_s, self._kernel.now_s), lambda: self._end(finished))

    def _end(self, finished: list[Sequence]) -> None:
        for request in finished:
            call = request.call
            call.cached_tokens = request.cached_tokens
            call.output_tokens = request.target - call.prompt_tokens
            self._done(call)
        self._begin()

    # --- one step ----------------------------------------------------------------------------------------------
    def _do_step(self) -> None:
        batch = _Batch(self.config.max_num_batched_tokens - len(self._decoding))
        request = self._prefilling
        if request is not None and request.computed + 1 == request.tokens:  # vLLM calls its last token a decode
            self._prefilling = None
            self._decoding.join(request)
            batch.budget -= 1
            request = None
            batch.late = True
        if not self._fits(request, batch):
            self._make_room(batch)
        else:
            self.cache.claim(self._decoding.blocks_needed())
            if request is not None:
                self._prefill(request, batch)
            self._admit(batch)
        self._run(batch)

    def _fits(self, request: Sequence | None, batch: _Batch) -> bool:
        needed = self._decoding.blocks_needed()
        if request is not None:
            chunk = min(request.tokens - request.computed, batch.budget)
            needed += -(-(request.computed + chunk) // self._size) - request.path.total
        return needed <= self.cache.num_free

    def _prefill(self, request: Sequence, batch: _Batch) -> None:
        chunk = min(request.tokens - request.computed, batch.budget)
        self.cache.allocate(request.path, -(-(request.computed + chunk) // self._size) - request.path.total)
        self._store(request.path, (request.computed + chunk) // self._size)
        batch.add(request, chunk)

    def _head_fits(self) -> bool:
        if not self._waiting or len(self._decoding) >= self.config.max_num_seqs:
            return False
        return self._admissible(self._waiting[0], self.config.max_num_batched_tokens - len(self._decoding)) is not None

    def _admissible(self, request: Sequence, budget: int) -> int | None:
        """Its hit in blocks, if its prompt fits now."""
        if budget <= 0:
            return None
        if self.config.enable_prefix_caching:
            hit, free = self.cache.hit(request.path, (request.tokens - 1) // self._size)
        else:
            hit = free = 0
        needed = request.tokens
        if not self.config.reserve_full_prompt:
            needed = hit * self._size + min(request.tokens - hit * self._size, budget)
        return hit if -(-needed // self._size) - hit + free <= self.cache.num_free else None

    def _admit(self, batch: _Batch) -> None:
        running = len(self._decoding) + len(batch.chunks)
        while self._waiting and running < self.config.max_num_seqs:
            request = self._waiting[0]
            hit = self._admissible(request, batch.budget)
            if hit is None:
                return
            self._waiting.popleft()
            running += 1
            self._orders += 1
            request.order = self._orders
            self.cache.touch(request.path, hit)
            if self.tier is not None:
                hit = self._restore(request, hit, batch)
            request.computed = hit * self._size
            if request.preemptions:
                self._recomputed_tokens += request.tokens - request.computed
            if request.cached_tokens is None:
                request.cached_tokens = request.computed
            self._prefill(request, batch)

    def _restore(self, request: Sequence, hit: int, batch: _Batch) -> int:
        """What the host has beyond the hit is read back; its prompt was found to fit."""
        assert self.tier is not None
        blocks = self.tier.hit(request.path, hit, (request.tokens - 1) // self._size)
        if blocks > hit:
            self.cache.allocate(request.path, blocks - hit)
            self.cache.store(request.path, blocks)
            batch.restore_s += (blocks - hit) * self.tier.restore_block_s
            self.tier.restored_blocks += blocks - hit
        return blocks

    def _run(self, batch: _Batch) -> None:
        """Time passes, tokens come out."""
        if not len(self._decoding) and not batch.chunks:
            self._busy = False
            return
        duration_s = self.config.latency.step_time_s(
            batch.prefill_tokens, batch.pairs, len(self._decoding), self._decoding.context_tokens
        )
        self._advance(1 if len(self._decoding) else 0)
        if batch.late:
            for request in self._decoding.members:
                if not request.prefilled:
                    self._first_token(request)
        finished = self._finished()
        self._prefilling = None
        for request, chunk in batch.chunks:
            request.computed += chunk
            if request.computed < request.tokens:
                self._prefilling = request
            else:
                self._yield_first(request, finished)
        self._kernel.after(duration_s + batch.restore_s, lambda: self._end(finished))

    def _yield_first(self, request: Sequence, finished: list[Sequence]) -> None:
        request.tokens += 1
        self._generation_tokens += 1
        self._first_token(request)
        if request.tokens >= request.target:
            self._finish(request)
            finished.append(request)
        else:
            self._decoding.join(request)

    def _first_token(self, request: Sequence) -> None:
        if not request.prefilled:
            request.prefilled = True
            self._prompt_tokens += request.call.prompt_tokens
            self._cached_tokens += request.cached_tokens or 0

    # --- who leaves --------------------------------------------------------------------------------------------
    def _leave(self, request: Sequence) -> None:
        self._decoding.leave(request)
        self._store(request.path, request.computed // self._size)

    def _finished(self) -> list[Sequence]:
        """Those that have yielded their last token, in the order of their admission; their blocks are free."""
        finished = self._decoding.pop_finished()
        for request in finished:
            self._store(request.path, request.computed // self._size)
            self._finish(request)
        return finished

    def _finish(self, request: Sequence) -> None:
        self.cache.free(request.path)
        del self._requests[request.call.id]

    def _store(self, path: Path, full: int) -> None:
        if not self.config.enable_prefix_caching:
            return
        self.cache.store(path, full)
        if self.tier is not None:
            self.tier.store_path(path, full)

    # --- no room -------------------------------------------------------------------------------------------------
    def _newest(self) -> Sequence:
        return self._prefilling or self._decoding.newest()

    def _make_room(self, batch: _Batch) -> None:
        """Oldest first, each takes the block that it needs; where there is none, the newest is preempted, at last
        itself. Nobody is admitted in such a step."""
        for request in self._decoding.needing():
            if request in self._decoding and self._evict_for(request, 1):
                self.cache.claim(1)
        prefilling = self._prefilling
        if prefilling is not None:
            batch.budget = self.config.max_num_batched_tokens - len(self._decoding)
            chunk = min(prefilling.tokens - prefilling.computed, batch.budget)
            needed = -(-(prefilling.computed + chunk) // self._size) - prefilling.path.total
            if self._evict_for(prefilling, needed):
                self._prefill(prefilling, batch)

    def _evict_for(self, request: Sequence, blocks: int) -> bool:
        while self.cache.num_free < blocks:
            victim = self._newest()
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        if victim is self._prefilling:
            self._prefilling = None
        else:
            self._leave(victim)
        self.cache.free(victim.path)
        victim.computed = 0
        victim.preemptions += 1
        self._preemptions += 1
        self._waiting.appendleft(victim)


class _Batch:
    """The prompt part of one step."""

    __slots__ = ("budget", "chunks", "late", "pairs", "prefill_tokens", "restore_s")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chunks: list[tuple[Sequence, int]] = []
        self.prefill_tokens = 0
        self.pairs = 0.0
        self.restore_s = 0.0
        self.late = False  # a prompt's last token is computed among the decodes

    def add(self, request: Sequence, chunk: int) -> None:
        self.chunks.append((request, chunk))
        self.budget -= chunk
        self.prefill_tokens += chunk
        self.pairs += chunk * (request.computed + (chunk + 1) / 2)
