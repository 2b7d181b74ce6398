"""What a fast replica computes in a step that is not decoding alone: `sim.replica`'s scheduler over sums.

Prompts come in chunks, as the exact replica cuts them, and at most one request is amid its prompt: it took the rest of
a step's token budget, so nobody was admitted after it. All others that run decode, and cost nothing each
(`fast_sequences`); only a step without room for all looks at them one by one.
"""

from __future__ import annotations

from collections import deque

from tidegate.sim.cpu_tier import CpuTier, CpuTierSpec
from tidegate.sim.fast_cache import FastCache, Path
from tidegate.sim.fast_sequences import Sequence, Sequences
from tidegate.sim.replica import ReplicaConfig


class Batch:
    """One step: its prompt part, and what comes out of it."""

    __slots__ = (
        "budget", "chunks", "context_tokens", "decodes", "finished", "late", "pairs", "preempted", "prefill_tokens",
        "restore_s", "sitting_out",
    )  # fmt: skip

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chunks: list[tuple[Sequence, int]] = []
        self.prefill_tokens = 0
        self.pairs = 0.0
        self.restore_s = 0.0
        self.late = False  # a prompt's last token is computed among the decodes
        self.preempted = False
        self.sitting_out: list[Sequence] = []  # they get nothing in this step
        self.decodes = 0
        self.context_tokens = 0  # of these
        self.finished: list[Sequence] = []

    @property
    def empty(self) -> bool:
        return not self.decodes and not self.chunks

    def add(self, request: Sequence, chunk: int) -> None:
        self.chunks.append((request, chunk))
        self.budget -= chunk
        self.prefill_tokens += chunk
        self.pairs += chunk * (request.computed + (chunk + 1) / 2)


class Steps:
    def __init__(self, config: ReplicaConfig, cpu_tier: CpuTierSpec | None) -> None:
        self.cache = FastCache(config.num_blocks)
        self.tier = CpuTier(cpu_tier, config.block_size) if cpu_tier is not None else None
        self.waiting: deque[Sequence] = deque()
        self.requests: dict[int, Sequence] = {}
        self.decoding = Sequences(config.block_size)
        self.prefilling: Sequence | None = None  # amid its prompt; it was admitted last
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.preemptions = 0
        self.recomputed_tokens = 0
        self._size = config.block_size
        self._budget = config.max_num_batched_tokens
        self._max_seqs = config.max_num_seqs
        self._caching = config.enable_prefix_caching
        self._reserve = config.reserve_full_prompt
        self._by_priority = config.scheduling_policy == "priority"
        self._orders = 0

    # --- requests ----------------------------------------------------------------------------------------------
    @property
    def running(self) -> int:
        return self.decoding.count + (self.prefilling is not None)

    @property
    def has_work(self) -> bool:
        return bool(self.decoding.count or self.waiting or self.prefilling is not None)

    def add(self, request: Sequence) -> None:
        self.requests[request.call.id] = request
        self._enqueue(request)

    def _enqueue(self, request: Sequence) -> None:
        waiting = self.waiting
        index = len(waiting)
        if self._by_priority:
            rank = request.rank
            while index and waiting[index - 1].rank > rank:
                index -= 1
        waiting.insert(index, request)

    def remove(self, request: Sequence) -> None:
        """It is wanted no more; what it computed stays cached."""
        del self.requests[request.call.id]
        if request.decoding:
            self._leave(request)
        elif request is self.prefilling:
            self.prefilling = None
        else:
            self.waiting.remove(request)
        self.cache.free(request.path)

    def preempt_all(self) -> None:
        while self.running:
            self._preempt(self._newest())

    # --- decoding alone ----------------------------------------------------------------------------------------
    def steps_ahead(self) -> int:
        """How many steps would only decode; 0: the next one does more, or does not have the blocks."""
        if self.prefilling is not None or not self.decoding.count or self._head_fits():
            return 0
        return self.decoding.steps_ahead(self.cache.num_free)

    def decode(self, steps: int) -> None:
        decoding = self.decoding
        blocks = decoding.blocks_needed(steps)
        if blocks:
            self.cache.claim(blocks)
        decoding.advance(steps)
        self.generation_tokens += steps * decoding.count

    def take_finished(self) -> list[Sequence]:
        """Those that have yielded their last token, in the order of their admission; their blocks are free."""
        finished = self.decoding.pop_finished()
        for request in finished:
            self._store(request.path, request.computed // self._size)
            self._finish(request)
        return finished

    # --- one step ----------------------------------------------------------------------------------------------
    def step(self) -> Batch:
        decoding = self.decoding
        batch = Batch(self._budget - decoding.count)
        request = self.prefilling
        if request is not None and request.computed + 1 == request.tokens:  # vLLM calls its last token a decode
            decoding.join(request)
            batch.budget -= 1
            batch.late = True
            self.prefilling = request = None
        decode_blocks = decoding.blocks_needed()
        blocks = decode_blocks if request is None else decode_blocks + self._chunk_blocks(request, batch.budget)
        if blocks > self.cache.num_free:
            self._make_room(batch)
        else:
            if decode_blocks:
                self.cache.claim(decode_blocks)
            if request is not None:
                self._prefill(request, batch)
            if self.waiting:
                self._admit(batch)
        self._compute(batch)
        return batch

    def _chunk_blocks(self, request: Sequence, budget: int) -> int:
        chunk = min(request.tokens - request.computed, budget)
        return -(-(request.computed + chunk) // self._size) - request.path.total

    def _prefill(self, request: Sequence, batch: Batch) -> None:
        chunk = min(request.tokens - request.computed, batch.budget)
        end = request.computed + chunk
        self.cache.allocate(request.path, -(-end // self._size) - request.path.total)
        self._store(request.path, end // self._size)
        batch.add(request, chunk)

    def _head_fits(self) -> bool:
        decodes = self.decoding.count
        if not self.waiting or decodes >= self._max_seqs:
            return False
        return self._admissible(self.waiting[0], self._budget - decodes) >= 0

    def _admissible(self, request: Sequence, budget: int) -> int:
        """Its hit in blocks, if its prompt fits now; else -1."""
        if budget <= 0:
            return -1
        size, tokens = self._size, request.tokens
        hit = free = 0
        if self._caching:
            hit, free = self.cache.hit(request.path, (tokens - 1) // size)
        if not self._reserve:
            tokens = min(tokens, hit * size + budget)
        return hit if -(-tokens // size) - hit + free <= self.cache.num_free else -1

    def _admit(self, batch: Batch) -> None:
        waiting = self.waiting
        running = self.decoding.count + len(batch.chunks)
        while waiting and running < self._max_seqs:
            request = waiting[0]
            hit = self._admissible(request, batch.budget)
            if hit < 0:
                return
            waiting.popleft()
            running += 1
            self._orders += 1
            request.order = self._orders
            self.cache.touch(request.path, hit)
            if self.tier is not None:
                hit = self._restore(request, hit, batch, self.tier)
            computed = request.computed = hit * self._size
            if request.preemptions:
                self.recomputed_tokens += request.tokens - computed
            if request.cached_tokens is None:
                request.cached_tokens = computed
            self._prefill(request, batch)

    def _restore(self, request: Sequence, hit: int, batch: Batch, tier: CpuTier) -> int:
        """What the host has beyond the hit is read back; its prompt was found to fit."""
        blocks = tier.hit(request.path, hit, (request.tokens - 1) // self._size)
        if blocks > hit:
            self.cache.allocate(request.path, blocks - hit)
            self.cache.store(request.path, blocks)
            batch.restore_s += (blocks - hit) * tier.restore_block_s
            tier.restored_blocks += blocks - hit
        return blocks

    def _compute(self, batch: Batch) -> None:
        """Tokens come out."""
        decoding = self.decoding
        batch.decodes, batch.context_tokens = decoding.count, decoding.context_tokens
        decoding.advance(1)
        self.generation_tokens += batch.decodes
        if batch.late:
            for request in decoding.members:
                if not request.prefilled:
                    self._first_token(request)
        batch.finished = self.take_finished()
        for request in batch.sitting_out:
            self._rejoin(request)
        if batch.chunks:
            self.prefilling = None
            for request, chunk in batch.chunks:
                request.computed += chunk
                if request.computed < request.tokens:
                    self.prefilling = request
                else:
                    self._yield_first(request, batch.finished)

    def _yield_first(self, request: Sequence, finished: list[Sequence]) -> None:
        request.tokens += 1
        self.generation_tokens += 1
        self._first_token(request)
        if request.tokens >= request.target:
            self._finish(request)
            finished.append(request)
        else:
            self.decoding.join(request)

    def _first_token(self, request: Sequence) -> None:
        if not request.prefilled:
            request.prefilled = True
            self.prompt_tokens += request.call.prompt_tokens
            self.cached_tokens += request.cached_tokens or 0

    # --- who leaves --------------------------------------------------------------------------------------------
    def _leave(self, request: Sequence) -> None:
        self.decoding.leave(request)
        self._store(request.path, request.computed // self._size)

    def _finish(self, request: Sequence) -> None:
        self.cache.free(request.path)
        del self.requests[request.call.id]

    def _store(self, path: Path, full: int) -> None:
        if self._caching:
            self.cache.store(path, full)
            if self.tier is not None:
                self.tier.store_path(path, full)

    # --- no room -----------------------------------------------------------------------------------------------
    def _make_room(self, batch: Batch) -> None:
        """In order of admission, each takes the blocks that it needs. Where there are none somebody is preempted: the
        newest, or by priority whoever ranks last; if that is whoever asks, all after it sit this step out. Nobody is
        admitted."""
        prefilling = self.prefilling
        for request in self.decoding.needing():
            if not request.decoding:
                continue  # preempted for one before it
            if not self._evict_for(request, 1, batch):
                self._sit_out(request.order, batch)
                return
            self.cache.claim(1)
        if prefilling is not None and prefilling is self.prefilling:
            batch.budget = self._budget - self.decoding.count
            if self._evict_for(prefilling, self._chunk_blocks(prefilling, batch.budget), batch):
                self._prefill(prefilling, batch)

    def _evict_for(self, request: Sequence, blocks: int, batch: Batch) -> bool:
        while self.cache.num_free < blocks:
            victim = self._worst() if self._by_priority else self._newest()
            batch.preempted = True
            self._preempt(victim, scheduled=victim.order < request.order)
            if victim is request:
                return False
        return True

    def _newest(self) -> Sequence:
        return self.prefilling or self.decoding.newest()

    def _worst(self) -> Sequence:
        running = list(self.decoding.members)
        if self.prefilling is not None:
            running.append(self.prefilling)
        return max(running, key=lambda request: (request.rank, -request.order))

    def _preempt(self, victim: Sequence, *, scheduled: bool = False) -> None:
        """`scheduled`: this step had given it its token already, and the block for it."""
        if victim is self.prefilling:
            self.prefilling = None
        else:
            self._leave(victim)
            if scheduled:
                victim.path.total = -(-(victim.computed + 1) // self._size)
                self._store(victim.path, (victim.computed + 1) // self._size)
        self.cache.free(victim.path)
        victim.computed = 0
        victim.preemptions += 1
        self.preemptions += 1
        if self._by_priority:
            self._enqueue(victim)
        else:
            self.waiting.appendleft(victim)

    def _sit_out(self, order: int, batch: Batch) -> None:
        for request in self.decoding.after(order):
            self.decoding.leave(request)
            batch.sitting_out.append(request)

    def _rejoin(self, request: Sequence) -> None:
        if request.prefilled:
            self.decoding.join(request)
        else:
            self.prefilling = request  # its prompt's last token is still to be computed
