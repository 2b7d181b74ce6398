"""The sequences that decode on a fast replica, as sums: a step advances all of them at no cost for each.

Every one gets a token a step, so when it ends is known when it begins: a heap of step numbers. A sequence needs a block
when its computed tokens fill the last one, which depends on (computed - step) modulo the block size only: a count for
each phase says how many blocks any step needs.
"""

from __future__ import annotations

from heapq import heappop, heappush
from operator import attrgetter

from tidegate.sim.fast_cache import Path
from tidegate.sim.rollout import Call

_by_order = attrgetter("order")


class Sequence:
    """A request on a fast replica."""

    __slots__ = (
        "arrived_s", "cached_tokens", "call", "computed", "decoding", "finish_step", "joined_step", "order", "path",
        "preemptions", "prefilled", "priority", "target", "tokens",
    )  # fmt: skip

    def __init__(self, call: Call, path: Path, target: int, arrived_s: float) -> None:
        self.call = call
        self.path = path
        self.tokens = call.prompt_tokens  # prompt and generated; while it decodes, as they were at `joined_step`
        self.computed = 0
        self.target = target
        self.priority = call.priority
        self.arrived_s = arrived_s
        self.order = 0  # of its admission among the running ones
        self.decoding = False
        self.joined_step = 0  # the step with which it began to decode
        self.finish_step = -1
        self.cached_tokens: int | None = None
        self.preemptions = 0
        self.prefilled = False  # its first token came

    @property
    def rank(self) -> tuple[int, float]:
        """Its place among those that wait, by priority; whoever runs and ranks last is preempted."""
        return (self.priority, self.arrived_s)


class Sequences:
    def __init__(self, block_size: int) -> None:
        self.step = 0  # done so far
        self.count = 0
        self.context_tokens = 0  # summed
        self.members: dict[Sequence, None] = {}
        self._size = block_size
        self._finishes: list[tuple[int, int, Sequence]] = []  # (step, order); those that left are skipped
        self._phases = [0] * block_size  # members by the step (modulo block size) that needs their next block

    def join(self, sequence: Sequence) -> None:
        """From the next step on it gets a token a step."""
        step, tokens = self.step, sequence.tokens
        sequence.decoding = True
        sequence.joined_step = step
        sequence.computed = tokens - 1
        finish_step = sequence.finish_step = step + sequence.target - tokens
        self.members[sequence] = None
        self.count += 1
        self.context_tokens += tokens
        self._phases[(step - tokens + 1) % self._size] += 1
        heappush(self._finishes, (finish_step, sequence.order, sequence))

    def leave(self, sequence: Sequence) -> None:
        """It decodes no more; its books are as they stand now."""
        del self.members[sequence]
        self.count -= 1
        self._phases[(sequence.joined_step - sequence.computed) % self._size] -= 1
        sequence.decoding = False
        sequence.tokens += self.step - sequence.joined_step
        computed = sequence.computed = sequence.tokens - 1
        sequence.finish_step = -1
        self.context_tokens -= sequence.tokens
        sequence.path.total = -(-computed // self._size)

    def tokens(self, sequence: Sequence) -> int:
        return sequence.tokens + (self.step - sequence.joined_step if sequence.decoding else 0)

    def advance(self, steps: int) -> None:
        self.step += steps
        self.context_tokens += steps * self.count

    def pop_finished(self) -> list[Sequence]:
        """Those that have their last token, in the order of their admission."""
        finished: list[Sequence] = []
        finishes, step = self._finishes, self.step
        while finishes and finishes[0][0] <= step:
            finish_step, _, sequence = heappop(finishes)
            if sequence.finish_step == finish_step:
                self.leave(sequence)
                finished.append(sequence)
        return finished

    def newest(self) -> Sequence:
        return max(self.members, key=_by_order)

    def after(self, order: int) -> list[Sequence]:
        """Those that were admitted later than this, oldest first."""
        return sorted((sequence for sequence in self.members if sequence.order > order), key=_by_order)

    def needing(self) -> list[Sequence]:
        """Those that need a block for the next step, oldest admission first."""
        step, size = self.step, self._size
        return sorted((s for s in self.members if (step - s.joined_step + s.computed) % size == 0), key=_by_order)

    def blocks_needed(self, steps: int = 1) -> int:
        """Of the next steps together, while nobody joins or leaves."""
        size, phases = self._size, self._phases
        first = self.step % size
        if steps == 1:
            return phases[first]
        cycles, rest = divmod(steps, size)
        last = first + rest
        part = sum(phases[first:last]) if last <= size else sum(phases[first:]) + sum(phases[: last - size])
        return cycles * self.count + part

    def steps_ahead(self, free_blocks: int) -> int:
        """Until the first member ends, or a block is missing; 0: it is missing now."""
        finishes = self._finishes
        while finishes[0][2].finish_step != finishes[0][0]:
            heappop(finishes)
        steps = finishes[0][0] - self.step
        sequences, size = self.count, self._size
        if sequences * (steps // size + 1) <= free_blocks or self.blocks_needed(steps) <= free_blocks:
            return steps
        cycles = free_blocks // sequences
        steps = cycles * size
        free_blocks -= cycles * sequences
        while self._phases[(self.step + steps) % size] <= free_blocks:
            free_blocks -= self._phases[(self.step + steps) % size]
            steps += 1
        return steps
