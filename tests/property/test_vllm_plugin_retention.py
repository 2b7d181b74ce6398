"""Retention against a twin that remembers users per block and searches everything."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.vllm_plugin.pool import Pool

SESSIONS = "pqrst"
PROMPTS = st.text("ab", min_size=1, max_size=5)
STEPS = st.one_of(
    st.tuples(st.just("turn"), st.sampled_from(SESSIONS), PROMPTS),
    st.tuples(st.just("begin"), st.sampled_from(SESSIONS), PROMPTS),
    st.tuples(st.just("end"), st.sampled_from(SESSIONS), PROMPTS),
    st.tuples(st.sampled_from(["release", "demote", "protect"]), st.sampled_from(SESSIONS), PROMPTS),
    st.tuples(st.just("reset"), st.just("p"), PROMPTS),
)


class Twin:
    """Users of each cached prefix, by the plain rule; gone with the block."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.users: dict[str, set[str]] = {}
        self.demoted: set[str] = set()

    def forget_evicted(self) -> None:
        for prefix in [prefix for prefix in self.users if prefix not in self.pool.cache]:
            del self.users[prefix]

    def used(self, session: str, prompt: str) -> None:
        self.demoted.discard(session)
        for end in range(1, len(prompt) + 1):
            self.users.setdefault(prompt[:end], set()).add(session)

    def released(self, session: str) -> set[str]:
        """Prefixes that are to come first."""
        mine = {prefix for prefix, users in self.users.items() if session in users}
        for prefix in mine:
            self.users[prefix].discard(session)
        self.demoted.discard(session)
        return {prefix for prefix in mine if not self.users[prefix] and self.pool.cache[prefix].ref_cnt == 0}

    def demotes(self, session: str) -> set[str]:
        self.demoted.add(session)
        return {
            prefix
            for prefix, users in self.users.items()
            if session in users and users <= self.demoted and self.pool.cache[prefix].ref_cnt == 0
        }


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_like_its_naive_twin(steps: list[tuple[str, str, str]]) -> None:
    pool = Pool(9)
    twin = Twin(pool)
    running: list[tuple[str, str, list[object]]] = []
    for name, session, prompt in steps:
        twin.forget_evicted()
        before = pool.order
        match name:
            case "turn" | "begin":
                table = pool.begin(prompt)
                twin.forget_evicted()
                if table is not None:
                    running.append((session, prompt, table))
                    if name == "turn":
                        end_newest(pool, twin, running)
            case "end" if running:
                end_newest(pool, twin, running)
            case "release":
                known = session in pool.retention.sessions
                first = twin.released(session)
                assert pool.retention.release([session]).moved == len(first)
                assert set(pool.order[: len(first)]) == first
                assert [prefix for prefix in before if prefix not in first] == pool.order[len(first) :] or not known
            case "demote":
                if session not in pool.retention.sessions:
                    continue
                moved = twin.demotes(session)
                assert pool.retention.demote([session]).moved == len(moved)
                stay = [prefix for prefix in before if prefix not in moved]
                assert [prefix for prefix in pool.order if prefix not in moved] == stay
                ahead = pool.order[: min((pool.order.index(prefix) for prefix in moved), default=0)]
                worth = [p for p in ahead if p is not None and twin.users.get(p, set()) - twin.demoted]
                assert not worth
            case "protect":
                if session not in pool.retention.sessions:
                    continue
                twin.demoted.discard(session)
                mine = {p for p, users in twin.users.items() if session in users and pool.cache[p].ref_cnt == 0}
                assert pool.retention.protect([session]).moved == len(mine)
                assert set(pool.order[len(pool.order) - len(mine) :]) == mine
            case "reset" if not running:
                pool.reset()
                twin.users.clear()
                twin.demoted.clear()
        check(pool, twin)


def end_newest(pool: Pool, twin: Twin, running: list[tuple[str, str, list[object]]]) -> None:
    session, prompt, table = running.pop()
    pool.end(session, table)  # type: ignore[arg-type]
    twin.used(session, prompt)


def check(pool: Pool, twin: Twin) -> None:
    twin.forget_evicted()
    free = [block for block in pool.blocks if block.ref_cnt == 0]
    assert len(pool.order) == len(free) == pool.free_block_queue.num_free_blocks
    resident = {name: blocks for name, (blocks, _, _) in pool.retention.resident().items()}
    counted = {s: sum(s in users for users in twin.users.values()) for s in SESSIONS}
    assert resident == {s: count for s, count in counted.items() if count}
    claims: dict[object, int] = {}
    for known in pool.retention.sessions.values():
        for prefix in known.blocks:
            claims[prefix] = claims.get(prefix, 0) + 1
    assert claims == pool.retention._claims
