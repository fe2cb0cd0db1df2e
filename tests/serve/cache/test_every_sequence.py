"""Any sequence of calls that a correct caller can make: the bytes add up, and nobody is evicted who may not be."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zen_train.serve.cache import Hit, Join, PolicyConfig, Start, TierCache, TooLarge, Wait

SIZES = {"a": 1, "b": 1, "c": 2, "d": 3, "e": 5, "f": 5, "g": 8, "h": 0}
keys = st.sampled_from(sorted(SIZES))


class Cache(RuleBasedStateMachine):
    """A device of our own beside the cache: it holds what it was told to load until it confirmed that it is gone."""

    def __init__(self):
        super().__init__()
        self.now_s = 0.0
        config = PolicyConfig(minimum_residency_s=2.0, auto_pins=2, auto_pin_requests=2.0)
        self.budget = 10
        self.cache = TierCache(budget_bytes=10, clock=lambda: self.now_s, config=config)
        self.leases = dict.fromkeys(SIZES, 0)
        self.loaded_at = {}
        self.loading = {}
        self.leaving = set()
        self.doomed = set()
        self.pinned = set()

    def evict(self, victims):
        for key in victims:
            assert not self.leases[key]
            del self.loaded_at[key]
            self.doomed.discard(key)
            self.leaving.add(key)

    @rule(key=keys, urgent=st.booleans())
    def plan(self, key, urgent):
        self.cache.record_request(key, SIZES[key])
        idle = {k for k in self.loaded_at if not self.leases[k]}
        plan = self.cache.plan_load(key, SIZES[key], urgent=urgent)
        if isinstance(plan, Hit):
            assert key in self.loaded_at
            self.doomed.discard(key)
        elif isinstance(plan, Join):
            assert key in self.loading
            self.doomed.discard(key)
        elif isinstance(plan, TooLarge):
            others = sum(SIZES[k] for k in self.pinned - {key} if k in self.loaded_at or k in self.loading)
            assert SIZES[key] > self.budget - others
        elif isinstance(plan, Start):
            assert set(plan.evict) <= idle - self.pinned
            if not urgent:
                assert all(self.loaded_at[k] + 2.0 <= self.now_s for k in plan.evict)
            self.evict(plan.evict)
            self.loading[key] = set(plan.evict)
        else:
            assert isinstance(plan, Wait)
            assert set(plan.drain) <= set(self.loaded_at) - idle - self.pinned
            assert plan.retry_at_s is None or plan.retry_at_s > self.now_s
            if plan.blocked_by == "being freed":
                assert self.leaving

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def confirm(self, data):
        key = data.draw(st.sampled_from(sorted(self.leaving)))
        self.leaving.remove(key)
        self.cache.evicted(key)
        for victims in self.loading.values():
            victims.discard(key)

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), leases=st.integers(0, 2), fails=st.booleans())
    def end_load(self, data, leases, fails):
        key = data.draw(st.sampled_from(sorted(self.loading)))
        if fails:
            self.cache.fail_load(key)
            self.doomed.discard(key)
        elif self.loading[key]:
            return
        else:
            assert self.cache.has_room(key)
            gone = self.cache.finish_load(key, leases=leases)
            self.loaded_at[key] = self.now_s
            self.leases[key] = leases
            assert gone == ((key,) if key in self.doomed and not leases else ())
            self.evict(gone)
        del self.loading[key]

    @precondition(lambda self: self.loaded_at)
    @rule(data=st.data())
    def acquire(self, data):
        key = data.draw(st.sampled_from(sorted(self.loaded_at)))
        self.cache.acquire(key)
        self.leases[key] += 1

    @precondition(lambda self: any(self.leases.values()))
    @rule(data=st.data())
    def release(self, data):
        key = data.draw(st.sampled_from(sorted(k for k, n in self.leases.items() if n)))
        self.leases[key] -= 1
        gone = self.cache.release(key)
        assert gone == ((key,) if key in self.doomed and not self.leases[key] else ())
        self.evict(gone)

    @rule(key=keys, wanted=st.booleans())
    def pin(self, key, wanted):
        (self.cache.pin if wanted else self.cache.unpin)(key)
        (self.pinned.add if wanted else self.pinned.discard)(key)

    @rule(key=keys)
    def remove(self, key):
        gone = self.cache.remove(key)
        self.pinned.discard(key)
        if key in self.loaded_at or key in self.loading:
            self.doomed.add(key)
        assert gone == ((key,) if key in self.loaded_at and not self.leases[key] else ())
        self.evict(gone)

    @rule(budget=st.integers(0, 14))
    def resize(self, budget):
        self.budget = budget
        victims = self.cache.resize(budget)
        assert not set(victims) & self.pinned
        self.evict(victims)

    @rule()
    def trim(self):
        victims = self.cache.trim()
        assert not set(victims) & self.pinned
        self.evict(victims)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 1000.0]))
    def time_passes(self, seconds):
        self.now_s += seconds

    @invariant()
    def it_adds_up(self):
        self.cache.check()
        view = self.cache.snapshot()
        where = {"resident": set(self.loaded_at), "loading": set(self.loading), "leaving": self.leaving}
        for entry in view.entries:
            assert entry.key in where[entry.where]
            assert entry.leases == self.leases[entry.key]
        assert len(view.entries) == sum(map(len, where.values()))
        # What the device holds at most: loads touch memory only once their room is complete.
        begun = sum(SIZES[k] for k, victims in self.loading.items() if not victims)
        held = sum(SIZES[k] for k in [*self.loaded_at, *self.leaving]) + begun
        assert held <= view.budget_bytes + view.owed_bytes

    def teardown(self):
        """Once everything has come to rest, whatever fits beside the pins can be loaded."""
        for key, victims in self.loading.items():
            if victims:
                self.cache.fail_load(key)
            else:
                self.cache.finish_load(key)
        for key, count in self.leases.items():
            for _ in range(count):
                self.cache.release(key)
        for entry in self.cache.snapshot().entries:
            if entry.where == "leaving":
                self.cache.evicted(entry.key)
        self.now_s += 1e6
        pinned = sum(e.size_bytes for e in self.cache.snapshot().entries if e.pinned)
        plan = (
            self.cache.plan_load("last", self.budget - pinned, urgent=True) if self.budget >= pinned else None
        )
        assert plan is None or isinstance(plan, Start), plan


Cache.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestEverySequence = Cache.TestCase
