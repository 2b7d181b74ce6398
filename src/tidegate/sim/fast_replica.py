"""The replica of `sim.replica`, told without its steps: equal decisions and times, in leaps.

While a replica only decodes, nothing happens until a request finishes, the free blocks run out, or somebody asks: each
step adds a token to every sequence, so n steps take

    T(n) = n (step_s + decode_seq_s D + kv_token_s K) + kv_token_s D n (n - 1) / 2         K summed contexts, D sequences

and need as many blocks as sequences cross a block's end, which is the number of sequences of each phase (context modulo
block size) times the cycles. Such a leap is one event. It is cut where a call arrives, at the end of the step that is
under way then. Steps with a prompt in them are done one by one, at a cost that does not grow with the sequences that
decode beside it; only a step that preempts looks at each of them. First come, first served only.
"""

from __future__ import annotations

import heapq
from collections import deque
from math import sqrt

from tidegate.sim.fast_cache import FastCache, Path
from tidegate.sim.kernel import Event, Kernel
from tidegate.sim.replica import ReplicaConfig
from tidegate.sim.replicas import Done, Totals
from tidegate.sim.rollout import Call, Rollout


class _Request:
    __slots__ = (
        "cached_tokens", "call", "computed", "finish_step", "joined_step", "order", "path", "preemptions", "prefilled",
        "target", "tokens",
    )  # fmt: skip

    def __init__(self, call: Call, path: Path, target: int) -> None:
        self.call = call
        self.path = path
        self.tokens = call.prompt_tokens  # prompt and generated; while it decodes, as they were at `joined_step`
        self.computed = 0
        self.target = target
        self.order = 0  # of its admission among the running ones
        self.joined_step = -1  # the replica's decode step at which it began to decode; -1: it does not
        self.finish_step = 0
        self.cached_tokens: int | None = None
        self.preemptions = 0
        self.prefilled = False  # its first token came


class _Leap:
    """Decode steps planned ahead; `start_s` and `steps` count from what is settled."""

    __slots__ = ("event", "start_s", "steps")

    def __init__(self, start_s: float, steps: int) -> None:
        self.start_s = start_s
        self.steps = steps
        self.event: Event | None = None


class FastReplica:
    def __init__(self, kernel: Kernel, config: ReplicaConfig, done: Done) -> None:
        if config.scheduling_policy != "fcfs":
            raise ValueError("the fast replica serves first come, first served; take the exact one")
        if config.max_num_seqs > config.max_num_batched_tokens:
            raise ValueError("max_num_seqs must not be above max_num_batched_tokens, as in vLLM")
        self.config = config
        self.cache = FastCache(config.num_blocks)
        self._kernel = kernel
        self._done = done
        self._size = config.block_size
        self._waiting: deque[_Request] = deque()
        self._requests: dict[int, _Request] = {}
        self._prefilling: _Request | None = None  # at most one is amid its prompt, and it was admitted last
        self._decoding: dict[_Request, None] = {}
        self._finishes: list[tuple[int, int, _Request]] = []  # (step, order); those that left are skipped
        self._phases = [0] * config.block_size  # sequences by the step (modulo block size) that needs their next block
        self._context_tokens = 0  # K
        self._step = 0  # decode steps done
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
        request = _Request(call, Path(call.rollout.context, self._size), target)
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
        generated = self._tokens(request) - call.prompt_tokens
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
        return call.output_tokens if request is None else self._tokens(request) - call.prompt_tokens

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
        if self.config.enable_prefix_caching and request in self._decoding:  # what it generates is booked when it ends
            blocks = max(blocks, (self._tokens(request) - 1) // self._size)
        return blocks * self._size

    def resident_blocks(self) -> int:
        self._settle(self._begun())
        return self.cache.resident

    # --- control -----------------------------------------------------------------------------------------------
    def flush(self) -> None:
        self._cut_leap()
        while self._prefilling is not None or self._decoding:
            self._preempt(self._newest())
        self.cache.reset()

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
        self._busy = not self._paused and bool(self._waiting or self._decoding or self._prefilling)
        if not self._busy:
            return
        if self._prefilling is None and self._decoding and not self._head_fits():
            steps = self._steps_ahead()
            if steps:
                self._start_leap(steps)
                return
        self._do_step()

    def _start_leap(self, steps: int) -> None:
        leap = self._leap = _Leap(self._kernel.now_s, steps)
        leap.event = self._kernel.after(self._leap_s(steps), self._end_leap)

    def _leap_s(self, steps: int) -> float:
        latency, sequences = self.config.latency, len(self._decoding)
        first_s = latency.step_time_s(0, 0.0, sequences, self._context_tokens)
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
        linear = latency.step_time_s(0, 0.0, sequences, self._context_tokens) - half
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
        self.cache.claim(self._blocks_needed(steps))
        self._advance(steps)

    def _advance(self, steps: int) -> None:
        sequences = len(self._decoding)
        self._step += steps
        self._context_tokens += steps * sequences
        self._generation_tokens += steps * sequences

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

    def _end(self, finished: list[_Request]) -> None:
        for request in finished:
            call = request.call
            call.cached_tokens = request.cached_tokens
            call.output_tokens = request.target - call.prompt_tokens
            self._done(call)
        self._begin()

    # --- a leap's length ---------------------------------------------------------------------------------------
    def _steps_ahead(self) -> int:
        """Until the first sequence ends, or a block is missing; 0: it is missing now."""
        while self._finishes and self._finishes[0][2].finish_step != self._finishes[0][0]:
            heapq.heappop(self._finishes)
        steps = self._finishes[0][0] - self._step
        free, sequences = self.cache.num_free, len(self._decoding)
        if sequences * (steps // self._size + 1) <= free or self._blocks_needed(steps) <= free:
            return steps
        cycles = free // sequences
        steps = cycles * self._size
        free -= cycles * sequences
        while self._phases[(self._step + steps) % self._size] <= free:
            free -= self._phases[(self._step + steps) % self._size]
            steps += 1
        return steps

    def _blocks_needed(self, steps: int) -> int:
        size, phases = self._size, self._phases
        cycles, rest = divmod(steps, size)
        first = self._step % size
        last = first + rest
        part = sum(phases[first:last]) if last <= size else sum(phases[first:]) + sum(phases[: last - size])
        return cycles * len(self._decoding) + part

    # --- one step ----------------------------------------------------------------------------------------------
    def _do_step(self) -> None:
        batch = _Batch(self.config.max_num_batched_tokens - len(self._decoding))
        request = self._prefilling
        if request is not None and request.computed + 1 == request.tokens:  # vLLM calls its last token a decode
            self._prefilling = None
            self._join(request, self._step)
            batch.budget -= 1
            request = None
            batch.late = True
        if not self._fits(request, batch):
            self._make_room(batch)
        else:
            self.cache.claim(self._phases[self._step % self._size])
            if request is not None:
                self._prefill(request, batch)
            self._admit(batch)
        self._run(batch)

    def _fits(self, request: _Request | None, batch: _Batch) -> bool:
        needed = self._phases[self._step % self._size]
        if request is not None:
            chunk = min(request.tokens - request.computed, batch.budget)
            needed += -(-(request.computed + chunk) // self._size) - request.path.total
        return needed <= self.cache.num_free

    def _prefill(self, request: _Request, batch: _Batch) -> None:
        chunk = min(request.tokens - request.computed, batch.budget)
        self.cache.allocate(request.path, -(-(request.computed + chunk) // self._size) - request.path.total)
        if self.config.enable_prefix_caching:
            self.cache.store(request.path, (request.computed + chunk) // self._size)
        batch.add(request, chunk)

    def _head_fits(self) -> bool:
        if not self._waiting or len(self._decoding) >= self.config.max_num_seqs:
            return False
        return self._admissible(self._waiting[0], self.config.max_num_batched_tokens - len(self._decoding)) is not None

    def _admissible(self, request: _Request, budget: int) -> int | None:
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
            request.computed = hit * self._size
            if request.preemptions:
                self._recomputed_tokens += request.tokens - request.computed
            if request.cached_tokens is None:
                request.cached_tokens = request.computed
            self._prefill(request, batch)

    def _run(self, batch: _Batch) -> None:
        """Time passes, tokens come out."""
        if not self._decoding and not batch.chunks:
            self._busy = False
            return
        duration_s = self.config.latency.step_time_s(
            batch.prefill_tokens, batch.pairs, len(self._decoding), self._context_tokens
        )
        self._advance(1 if self._decoding else 0)
        if batch.late:
            for request in self._decoding:
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
        self._kernel.after(duration_s, lambda: self._end(finished))

    def _yield_first(self, request: _Request, finished: list[_Request]) -> None:
        request.tokens += 1
        self._generation_tokens += 1
        self._first_token(request)
        if request.tokens >= request.target:
            self._finish(request, finished)
        else:
            self._join(request, self._step)

    def _first_token(self, request: _Request) -> None:
        if not request.prefilled:
            request.prefilled = True
            self._prompt_tokens += request.call.prompt_tokens
            self._cached_tokens += request.cached_tokens or 0

    # --- sequences that decode -----------------------------------------------------------------------------------
    def _join(self, request: _Request, step: int) -> None:
        request.joined_step = step
        request.computed = request.tokens - 1
        request.finish_step = step + request.target - request.tokens
        self._decoding[request] = None
        self._context_tokens += request.tokens
        self._phases[(step - request.computed) % self._size] += 1
        heapq.heappush(self._finishes, (request.finish_step, request.order, request))

    def _tokens(self, request: _Request) -> int:
        return request.tokens + (self._step - request.joined_step if request in self._decoding else 0)

    def _leave(self, request: _Request) -> None:
        """It decodes no more; its books are as they stand now."""
        del self._decoding[request]
        self._phases[(request.joined_step - request.computed) % self._size] -= 1
        request.tokens += self._step - request.joined_step
        request.computed = request.tokens - 1
        request.finish_step = -1
        self._context_tokens -= request.tokens
        path = request.path
        path.total = -(-request.computed // self._size)
        if self.config.enable_prefix_caching:
            self.cache.store(path, request.computed // self._size)

    def _finished(self) -> list[_Request]:
        """Those that have yielded their last token, in the order of their admission; their blocks are free."""
        finished = []
        while self._finishes and self._finishes[0][0] <= self._step:
            finish_step, _, request = heapq.heappop(self._finishes)
            if request.finish_step == finish_step:
                self._leave(request)
                self._finish(request, finished)
        return finished

    def _finish(self, request: _Request, finished: list[_Request]) -> None:
        self.cache.free(request.path)
        del self._requests[request.call.id]
        finished.append(request)

    # --- no room -------------------------------------------------------------------------------------------------
    def _newest(self) -> _Request:
        return self._prefilling or max(self._decoding, key=lambda request: request.order)

    def _make_room(self, batch: _Batch) -> None:
        """Oldest first, each takes the block that it needs; where there is none, the newest is preempted, at last
        itself. Nobody is admitted in such a step."""
        needing = [r for r in self._decoding if (self._step - r.joined_step + r.computed) % self._size == 0]
        for request in sorted(needing, key=lambda request: request.order):
            if request in self._decoding and self._evict_for(request, 1):
                self.cache.claim(1)
        prefilling = self._prefilling
        if prefilling is not None:
            batch.budget = self.config.max_num_batched_tokens - len(self._decoding)
            chunk = min(prefilling.tokens - prefilling.computed, batch.budget)
            needed = -(-(prefilling.computed + chunk) // self._size) - prefilling.path.total
            if self._evict_for(prefilling, needed):
                self._prefill(prefilling, batch)

    def _evict_for(self, request: _Request, blocks: int) -> bool:
        while self.cache.num_free < blocks:
            victim = self._newest()
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: _Request) -> None:
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

    __slots__ = ("budget", "chunks", "late", "pairs", "prefill_tokens")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chunks: list[tuple[_Request, int]] = []
        self.prefill_tokens = 0
        self.pairs = 0.0
        self.late = False  # a prompt's last token is computed among the decodes

    def add(self, request: _Request, chunk: int) -> None:
        self.chunks.append((request, chunk))
        self.budget -= chunk
        self.prefill_tokens += chunk
        self.pairs += chunk * (request.computed + (chunk + 1) / 2)
