"""One inference replica, sans I/O: vLLM v1's scheduler over a paged KV cache, in model time.

`step(now_s)` forms one batch, and returns how long it takes and what it yields. The caller owns time: it delivers the
outputs at `now_s + duration_s`, and calls the next step then. `add` and `abort` between two steps take effect at the
next one, as in an engine that is busy with a forward pass. Nothing here reads a clock or draws a random number.

A step (vLLM's `Scheduler.schedule`, without speculative decoding, LoRA, encoders or KV connectors):
1. Running requests first, oldest admission first. Each gets the tokens that it lacks, as far as the token budget goes:
   a chunk of its prompt, or one token. Blocks are allocated as they are needed. When there is none, the request that
   was admitted last (or, by priority, the worst) is preempted: its blocks are freed, it goes to the head of the queue
   and is computed again from whatever of its prefix is still cached.
2. Then, unless somebody was preempted, waiting requests: in order of arrival, or of (priority, arrival). One is
   admitted while there are sequence slots and token budget and its whole prompt fits in the free blocks. The cached
   prefix counts as computed, except the last token, which must be computed to be sampled from; hits are whole blocks.
3. Full blocks enter the prefix cache at once. A request that has all its tokens computed yields one token. One that has
   yielded its last is finished: its blocks are freed last to first, and stay cached until they are allocated again.

The tokens themselves are the caller's: a request says how many it will generate, and gives the hashes of its blocks
(`Request.grow_hashes` for those that it generates).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from tidegate.sim.blocks import BlockEvent, BlockHash, BlockId, BlockPool
from tidegate.sim.latency import CPU_TINY, LatencyModel
from tidegate.sim.replica_counters import Counters

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
PauseMode: TypeAlias = Literal["abort", "wait", "keep"]


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Names and defaults are vLLM's where it has them."""

    num_blocks: int  # the null block included, as in vLLM's num_gpu_blocks
    block_size: int = 16
    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    enable_prefix_caching: bool = True
    reserve_full_prompt: bool = True  # vLLM: scheduler_reserve_full_isl
    record_events: bool = False
    latency: LatencyModel = CPU_TINY

    def __post_init__(self) -> None:
        if self.num_blocks < 2:
            raise ValueError(f"{self.num_blocks} KV blocks of {self.block_size} tokens: at least 2 are needed")
        if self.max_model_len > (self.num_blocks - 1) * self.block_size:
            raise ValueError(
                f"max_model_len {self.max_model_len} needs more than the KV cache's "
                f"{self.num_blocks - 1} blocks of {self.block_size} tokens"
            )


class Request:
    """A request and its progress. Fields below the line belong to the replica."""

    __slots__ = (
        "arrival_s", "blocks", "cached_tokens", "computed", "finish_reason", "first_token_s", "hashes", "id",
        "max_output", "output_tokens", "preemptions", "priority", "prompt_tokens", "scheduled_s", "session",
        "slots", "state", "stored", "target", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        id: str,
        prompt_tokens: int,
        output_tokens: int,
        hashes: list[BlockHash] | None = None,
        *,
        session: str | None = None,
        priority: int = 0,
        arrival_s: float = 0.0,
        finish_reason: FinishReason = "length",
    ) -> None:
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens  # how many it will generate
        self.finish_reason: FinishReason = finish_reason  # why it ends there
        self.hashes: list[BlockHash] = hashes if hashes is not None else []  # of its full blocks, as far as known
        self.session = session
        self.priority = priority
        self.arrival_s = arrival_s
        # ---
        self.state: Literal["new", "waiting", "running", "finished"] = "new"
        self.tokens = prompt_tokens  # prompt and generated
        self.computed = 0  # tokens with KV
        self.target = prompt_tokens + output_tokens  # total tokens at its end
        self.blocks: list[BlockId] = []
        self.slots = 0  # len(blocks) * block_size
        self.stored = 0  # blocks of it in the prefix cache
        self.cached_tokens: int | None = None  # prompt tokens found in the cache, at its first admission
        self.preemptions = 0
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None

    @property
    def generated(self) -> int:
        return self.tokens - self.prompt_tokens

    def grow_hashes(self, blocks: int) -> None:
        """Extend `hashes` to this many blocks; generated blocks without a hash are not cached."""


class StepResult(msgspec.Struct):
    duration_s: float
    outputs: list[Request]  # each yielded one token
    finished: list[Request]  # subset of outputs
    preempted: list[Request]
    prefill_tokens: int
    decode_seqs: int


class Replica:
    def __init__(self, config: ReplicaConfig) -> None:
        self.config = config
        self.pool = BlockPool(
            config.num_blocks, enable_caching=config.enable_prefix_caching, record_events=config.record_events
        )
        self.counters = Counters()
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.requests: dict[str, Request] = {}
        self.give_back: Callable[[Request], None] | None = None  # instead of `pool.free`, by who keeps books of it
        self._paused: Literal["no", "new", "all"] = "no"
        self._block_size = config.block_size
        self._by_priority = config.scheduling_policy == "priority"

    # --- requests ---------------------------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        if request.id in self.requests:
            raise ValueError(f"request {request.id!r} is known")
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError("a request has at least one prompt token and one output token")
        if request.prompt_tokens >= self.config.max_model_len:
            raise ValueError(
                f"a prompt of {request.prompt_tokens} tokens leaves no room in {self.config.max_model_len}"
            )
        if request.target > self.config.max_model_len:
            request.target, request.finish_reason = self.config.max_model_len, "length"
        request.state = "waiting"
        self.requests[request.id] = request
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        if not self._by_priority:
            self.waiting.append(request)
            return
        key = (request.priority, request.arrival_s)
        index = len(self.waiting)
        while index and (self.waiting[index - 1].priority, self.waiting[index - 1].arrival_s) > key:
            index -= 1
        self.waiting.insert(index, request)

    def abort(self, id: str) -> Request | None:
        """The request, if it was still unfinished. Its computed blocks stay cached."""
        request = self.requests.get(id)
        if request is None:
            return None
        (self.running if request.state == "running" else self.waiting).remove(request)
        self._finish(request, "abort")
        return request

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.state = "finished"
        request.finish_reason = reason
        del self.requests[request.id]
        self._release(request)

    def _release(self, request: Request) -> None:
        if self.give_back is None:
            self.pool.free(reversed(request.blocks))
        else:
            self.give_back(request)
        request.blocks = []
        request.slots = request.stored = request.computed = 0

    # --- pause, reset -----------------------------------------------------------------------------------------
    @property
    def is_paused(self) -> bool:
        return self._paused != "no"

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        if self._paused == "all":
            return False
        return bool(self.running) or (self._paused == "no" and bool(self.waiting))

    def pause(self, mode: PauseMode) -> list[Request]:
        """Take no new requests from the queue; `abort` ends all of them and returns them, `wait` lets running ones go
        on to their end (`has_work` tells when), `keep` freezes them where they are."""
        aborted = self.abort_all() if mode == "abort" else []
        self._paused = "all" if mode == "keep" else "new"
        return aborted

    def resume(self) -> None:
        self._paused = "no"

    def abort_all(self) -> list[Request]:
        aborted = list(self.requests.values())
        for request in aborted:
            self.abort(request.id)
        return aborted

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Refused while requests hold blocks, unless they may be preempted."""
        if reset_running_requests:
            while self.running:
                self._preempt(self.running.pop())
        return self.pool.reset()

    def take_events(self) -> list[BlockEvent]:
        return self.pool.take_events()

    # --- the step ---------------------------------------------------------------------------------------------
    def step(self, now_s: float) -> StepResult:
        batch = _Batch(self.config.max_num_batched_tokens)
        if self._paused != "all":
            self._schedule_running(batch)
            if not batch.preempted and self._paused == "no":
                self._admit(batch, now_s)
        duration_s = 0.0
        if batch.decoding or batch.prefilling:
            duration_s = self.config.latency.step_time_s(
                batch.prefill_tokens,
                batch.attention_pairs,
                len(batch.decoding),
                batch.kv_tokens,
                len(batch.prefilling),
            )
        result = StepResult(duration_s, [], [], batch.preempted, batch.prefill_tokens, len(batch.decoding))
        self._complete(batch, result, now_s + duration_s)
        return result

    def _schedule_running(self, batch: _Batch) -> None:
        block_size = self._block_size
        running = self.running
        index = 0
        while index < len(running) and batch.budget > 0:
            request = running[index]
            computed = request.computed
            if computed + 1 == request.tokens:  # decoding: one token, at most one block
                if computed == request.slots and not self._make_room(request, 1, batch):
                    break
                if not (computed + 1) % block_size:
                    self._store(request, computed + 1)
                batch.add_decode(request)
            else:
                chunk = min(request.tokens - computed, batch.budget)
                missing = -(-(computed + chunk) // block_size) - len(request.blocks)
                if missing > 0 and not self._make_room(request, missing, batch):
                    break
                self._store(request, computed + chunk)
                batch.add_prefill(request, chunk)
            # By priority, a victim may have stood before this request.
            index = index + 1 if not self._by_priority else running.index(request) + 1

    def _make_room(self, request: Request, blocks: int, batch: _Batch) -> bool:
        """Allocate blocks for a running request, preempting others or, last, itself."""
        while self.pool.num_free < blocks:
            victim = max(self.running, key=_worst) if self._by_priority else self.running[-1]
            self.running.remove(victim) if self._by_priority else self.running.pop()
            batch.drop(victim)
            self._preempt(victim)
            batch.preempted.append(victim)
            if victim is request:
                return False
        self._extend(request, blocks)
        return True

    def _extend(self, request: Request, blocks: int) -> None:
        request.blocks.extend(self.pool.allocate(blocks))
        request.slots = len(request.blocks) * self._block_size

    def _preempt(self, victim: Request) -> None:
        self._release(victim)
        victim.state = "waiting"
        victim.preemptions += 1
        self.counters.num_preemptions += 1
        if self._by_priority:
            self._enqueue(victim)
        else:
            self.waiting.appendleft(victim)

    def _admit(self, batch: _Batch, now_s: float) -> None:
        while self.waiting and batch.budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            # The last token is computed even if all are cached: there must be something to sample from.
            hit = self.pool.longest_hit(request.hashes, (request.tokens - 1) // self._block_size)
            computed = len(hit) * self._block_size
            chunk = min(request.tokens - computed, batch.budget)
            needed_tokens = request.tokens if self.config.reserve_full_prompt else computed + chunk
            if -(-needed_tokens // self._block_size) - len(hit) + self.pool.free_among(hit) > self.pool.num_free:
                return
            self.waiting.popleft()
            self.pool.touch(hit)
            request.blocks, request.computed, request.stored = hit, computed, len(hit)
            request.slots = computed
            self._extend(request, -(-(computed + chunk) // self._block_size) - len(hit))
            self._store(request, computed + chunk)
            self.counters.admitted(request, computed)
            request.state = "running"
            if request.scheduled_s is None:
                request.scheduled_s = now_s
            self.running.append(request)
            batch.add_prefill(request, chunk)

    def _store(self, request: Request, computed: int) -> None:
        """Blocks that this step fills enter the prefix cache before it runs, so that the next request finds them."""
        full = min(computed, request.tokens) // self._block_size
        if full <= request.stored or not self.config.enable_prefix_caching:
            return
        if len(request.hashes) < full:
            request.grow_hashes(full)
            full = min(full, len(request.hashes))
        self.pool.store(request.id, request.session, request.blocks, request.hashes, request.stored, full)
        request.stored = full

    def _complete(self, batch: _Batch, result: StepResult, at_s: float) -> None:
        outputs = result.outputs
        ended = False
        for request in batch.decoding:
            request.computed += 1
            outputs.append(request)
        for request, chunk in batch.prefilling.items():
            request.computed += chunk
            if request.computed == request.tokens:
                outputs.append(request)
        for request in outputs:
            request.tokens += 1
            if request.first_token_s is None:
                request.first_token_s = at_s
                self.counters.prefilled(request)
            ended = ended or request.tokens >= request.target
        self.counters.generation_tokens += len(outputs)
        if ended:  # freed in running order, which is the order of eviction
            result.finished = [request for request in self.running if request.tokens >= request.target]
            self.running = [request for request in self.running if request.tokens < request.target]
            for request in result.finished:
                self._finish(request, request.finish_reason)


def _worst(request: Request) -> tuple[int, float]:
    return (request.priority, request.arrival_s)


class _Batch:
    """What one step computes, and what its time depends on."""

    __slots__ = ("attention_pairs", "budget", "decoding", "kv_tokens", "preempted", "prefill_tokens", "prefilling")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.decoding: list[Request] = []
        self.prefilling: dict[Request, int] = {}
        self.preempted: list[Request] = []
        self.prefill_tokens = 0
        self.attention_pairs = 0.0
        self.kv_tokens = 0

    def add_decode(self, request: Request) -> None:
        self.decoding.append(request)
        self.budget -= 1
        self.kv_tokens += request.tokens

    def add_prefill(self, request: Request, chunk: int) -> None:
        self.prefilling[request] = chunk
        self.budget -= chunk
        self.prefill_tokens += chunk
        self.attention_pairs += _pairs(request, chunk)

    def drop(self, request: Request) -> None:
        """A victim that this batch already had (by priority only)."""
        chunk = self.prefilling.pop(request, None)
        if chunk is not None:
            self.budget += chunk
            self.prefill_tokens -= chunk
            self.attention_pairs -= _pairs(request, chunk)
        elif request in self.decoding:
            self.decoding.remove(request)
            self.budget += 1
            self.kv_tokens -= request.tokens


def _pairs(request: Request, chunk: int) -> float:
    return chunk * (request.computed + (chunk + 1) / 2)
