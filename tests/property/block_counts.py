"""Blocks allocated = held + free, counted one by one: on the exact replica from its block tables, on the fast one from
its runs and sums."""

from __future__ import annotations

from tidegate.sim.fast_replica import FastReplica
from tidegate.sim.fast_sequences import Sequence
from tidegate.sim.replica import Replica


def check_exact(replica: Replica) -> None:
    size = replica.config.block_size
    held = [block for request in replica.running for block in request.blocks]
    free = replica.pool.free_order()
    assert len(free) == len(set(free)) == replica.pool.num_free
    assert sorted({*held, *free}) == list(range(1, replica.config.num_blocks))
    assert set(held).isdisjoint(free)
    for block in set(held):
        assert replica.pool.refs(block) == held.count(block)
    for request in replica.waiting:
        assert request.blocks == []
    for request in replica.running:
        assert request.computed <= request.tokens <= request.target
        assert len(request.blocks) * size >= request.computed
    assert len(replica.running) <= replica.config.max_num_seqs


def check_fast(replica: FastReplica) -> None:
    steps, cache = replica.steps, replica.steps.cache
    free = cache._empty + sum(run.high - run.low for run in cache._queue)
    assert free == cache.num_free >= 0
    held = sum(branch.held - branch.first for branch in cache._branches.values())  # whoever shares them, once
    for request in steps.requests.values():
        held += _blocks(replica, request) - request.path.stored + request.path.spare
    assert held + free == cache.num_blocks - 1
    for branch in cache._branches.values():
        assert branch.first <= branch.held <= branch.resident
        assert sum(run.high - run.low for run in branch.runs) == branch.resident - branch.held
        assert branch.held == max(branch.users, default=branch.first)
    assert all(not _blocks(replica, request) for request in steps.waiting)
    assert steps.running <= replica.config.max_num_seqs
    assert steps.running + len(steps.waiting) == len(steps.requests)


def _blocks(replica: FastReplica, request: Sequence) -> int:
    if not request.decoding:
        return request.path.total
    computed = replica.steps.decoding.tokens(request) - 1
    return -(-computed // replica.config.block_size)
