"""Whatever comes, in whatever order: blocks and tokens are conserved, and everybody ends."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.block_counts import check_exact

from tidegate.sim.replica import Replica, ReplicaConfig, Request

BLOCK = 4
LENGTH = 40

arrivals = st.lists(
    st.tuples(
        st.integers(0, 30),  # step of arrival
        st.integers(0, 3),  # conversation
        st.integers(1, LENGTH - 1),  # prompt
        st.integers(1, 30),  # output
        st.integers(0, 2),  # priority
        st.one_of(st.none(), st.integers(0, 25)),  # aborted so many steps later
    ),
    min_size=1,
    max_size=14,
)
configs = st.builds(
    ReplicaConfig,
    num_blocks=st.integers(LENGTH // BLOCK + 1, 30),
    block_size=st.just(BLOCK),
    max_model_len=st.just(LENGTH),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(1, 64),
    scheduling_policy=st.sampled_from(["fcfs", "priority"]),
    enable_prefix_caching=st.booleans(),
    reserve_full_prompt=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(config=configs, plan=arrivals, flush_step=st.integers(0, 60))
def test_blocks_and_tokens_are_conserved_and_everybody_ends(
    config: ReplicaConfig, plan: list[tuple], flush_step: int
) -> None:
    replica = Replica(config)
    yielded: dict[str, int] = {}
    aborted: set[str] = set()
    requests: dict[str, Request] = {}
    step = 0
    while step <= 60 or replica.has_work:
        for index, (at, conversation, prompt, output, priority, lifetime) in enumerate(plan):
            id = str(index)
            if at == step:
                hashes = [(conversation, block) for block in range(LENGTH // BLOCK)]
                requests[id] = Request(id, prompt, output, hashes, priority=priority, arrival_s=float(step))
                replica.add(requests[id])
            if lifetime is not None and at + lifetime == step and replica.abort(id) is not None:
                aborted.add(id)
                check_exact(replica)
        if step == flush_step:
            assert replica.reset_prefix_cache(reset_running_requests=True)
            check_exact(replica)
        result = replica.step(float(step))
        assert result.prefill_tokens + result.decode_seqs <= config.max_num_batched_tokens
        for request in result.outputs:
            yielded[request.id] = yielded.get(request.id, 0) + 1
        check_exact(replica)
        step += 1
        assert step < 20_000
    assert replica.requests == {}
    assert replica.pool.num_free == config.num_blocks - 1
    for id, request in requests.items():
        if id not in aborted:
            assert yielded[id] == min(request.output_tokens, LENGTH - request.prompt_tokens)
    assert replica.counters.generation_tokens == sum(yielded.values())
    if not config.enable_prefix_caching:
        assert replica.counters.prompt_tokens_cached == 0
