"""The ledgers of one partition through owners that come and go, judged by what an outsider counts in the log."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decisions import recalled
from decisions.accounts import Accounts
from decisions.ledger import NEW, Unit, Window
from decisions.quota import EACH
from schemas.events import InferenceAdmitted, InferenceFailed, InferenceRejected, Quota
from schemas.topics import INTERACTIVE
from tests.decisions.ledger_site import LATER_MS, RECALLED, Site, follow, subject
from tests.decisions.ledgers import GAPS, ONE_LIMIT, Asked, check_limits, ending, in_use

WHO: Any = {"key": st.sampled_from(["k1", "k2"]), "tenant": st.sampled_from(["acme", "acme", "beta"])}
RANDOM = st.randoms(use_true_random=False)


FROM_END = -8
"""What is asked again was told at most so many events ago, so that it is still recalled when that is decided."""


class AnyInterleaving(RuleBasedStateMachine):
    """Requests, endings, cancels, repetitions, rows, crashes and owners that don't know they aren't, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.site = Site(())
        self.fresh = 0
        self.seen = -1
        self.patched = mock.patch.object(recalled, "RECALLED_RECORDS", RECALLED)
        self.patched.start()

    @initialize(whole=ONE_LIMIT, each=ONE_LIMIT)
    def begin(self, whole: Quota, each: Quota) -> None:
        self.site = Site((whole, replace(each, key_id=EACH)))

    # --- requests ---

    @rule(tokens=st.integers(0, 30), gap_ms=GAPS, together=st.integers(1, 4), **WHO)
    def ask(self, tokens: int, key: str, tenant: str, gap_ms: int, together: int) -> None:
        for number in range(together):
            self.fresh += 1
            self.site.ask(Asked(0, f"r{self.fresh}", tokens, key, tenant), 0 if number else gap_ms)

    @rule(tokens=st.integers(0, 30), gap_ms=GAPS, together=st.integers(1, 4), doomed=st.booleans(), **WHO)
    def ask_and_decide(self, tokens: int, key: str, tenant: str, gap_ms: int, together: int, doomed: bool) -> None:
        self.ask(tokens, key, tenant, gap_ms, together)
        while self.site.take_request(doomed=doomed and self.site.head % 3 == 0) is not None:
            pass

    @rule(count=st.integers(1, 6), doomed=st.sampled_from([False, False, True]))
    def decide(self, count: int, doomed: bool) -> None:
        for _ in range(count):
            self.site.take_request(doomed=doomed)

    @rule(data=st.data(), tokens=st.integers(0, 30), heard=st.booleans())
    def ask_again(self, data: st.DataObject, tokens: int, heard: bool) -> None:
        """What was let in, refused, or ended before anybody asked."""
        site = self.site
        site.calm()
        if not heard:
            site.append(ending(self._new("c"), 0))
        if events := site.newest(InferenceAdmitted, InferenceRejected, InferenceFailed)[FROM_END:]:
            event = data.draw(st.sampled_from(events))
            site.ask(Asked(0, event.request_id, tokens, "k1", event.tenant))
            site.take_request()
            site.calm()

    def _new(self, prefix: str) -> str:
        self.fresh += 1
        return f"{prefix}{self.fresh}"

    # --- the log ---

    @precondition(lambda self: self.site.flying)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        self.site.deliver(data.draw(st.sampled_from(self.site.flying)))

    @rule(count=st.integers(1, 12))
    def fold(self, count: int) -> None:
        self.site.fold(count)

    @precondition(lambda self: self.site.running())
    @rule(data=st.data(), used=st.integers(0, 40), times=st.integers(1, 2))
    def end(self, data: st.DataObject, used: int, times: int) -> None:
        """A worker, the timer or a cancel: whatever was used, and perhaps told twice."""
        asked = data.draw(st.sampled_from(self.site.running()))
        for _ in range(times):
            self.site.append(ending(asked.request_id, used, asked.tenant))

    @rule(used=st.integers(0, 30))
    def end_before_it_is_told(self, used: int) -> None:
        """Work and verdict were sent together."""
        for one in self.site.flying:
            if isinstance(one.event, InferenceAdmitted) and not one.doomed:
                return self.site.append(ending(one.event.request_id, used, one.event.tenant))
        return None

    @rule(share=st.sampled_from([0.0, 0.5, 1.0, 1.0]))
    def end_all(self, share: float) -> None:
        """So that only windows and budgets limit."""
        self.site.end_all(share)

    @rule(data=st.data())
    def tell_an_ending_again(self, data: st.DataObject) -> None:
        if ended := [event for _, event in self.site.log if isinstance(event, InferenceFailed)]:
            self.site.append(data.draw(st.sampled_from(ended)))

    @rule(data=st.data())
    def tell_a_verdict_again(self, data: st.DataObject) -> None:
        if verdicts := self.site.newest(InferenceAdmitted, InferenceRejected):
            self.site.append(data.draw(st.sampled_from(verdicts)))

    @precondition(lambda self: self.site.late)
    @rule(data=st.data())
    def tell_too_late(self, data: st.DataObject) -> None:
        """What a former owner sent, after this one has told what it decided of the same record, or has let it in.

        What this one has refused the other let in too late by its lease, too.
        """
        event = data.draw(st.sampled_from(self.site.late))
        self.site.late.remove(event)
        let_in = [one.event for one in self.site.flying if isinstance(one.event, InferenceAdmitted)]
        let_in += [e for e in self.site.newest(InferenceAdmitted) if not e.valid_until_ms]
        known = [*self.site.newest(InferenceRejected), *let_in]
        if isinstance(event, InferenceAdmitted) and subject(event) not in map(subject, let_in):
            event = replace(event, valid_until_ms=1)
        if subject(event) in map(subject, known):
            self.site.append(event)

    # --- rows and owners ---

    @rule()
    def commit(self) -> None:
        self.site.commit()

    @rule(random=RANDOM, written=st.booleans(), commit=st.booleans())
    def save(self, random: Random, written: bool, commit: bool) -> None:
        if commit:
            self.site.commit()
        self.site.save(self.site.present, random, written=written)

    @precondition(lambda self: self.site.formers)
    @rule(data=st.data(), random=RANDOM, count=st.integers(0, 30), written=st.booleans())
    def save_late(self, data: st.DataObject, random: Random, count: int, written: bool) -> None:
        former = data.draw(st.sampled_from(self.site.formers))
        follow(former.accounts, self.site.log, count)
        self.site.save(former, random, written=written)

    @rule(random=RANDOM, crashed=st.booleans())
    def hand_over(self, random: Random, crashed: bool) -> None:
        self.site.hand_over(random, crashed=crashed)
        self._check_recovered(self.site.owner)

    @rule(random=RANDOM)
    def recover_beside(self, random: Random) -> None:
        self._check_recovered(self.site.recovered(random))

    # --- what holds ---

    @invariant()
    def no_limit_is_passed_in_any_window(self) -> None:
        """By what the whole log tells, and what this owner has decided besides."""
        site = self.site
        if (now := len(site.log) + len(site.mine)) != self.seen:
            self.seen = now
            for tenant in ("acme", "beta"):
                check_limits(site.known(tenant, len(site.log)), site.quotas, site.newest_ms)

    @invariant()
    def the_owner_counts_what_an_outsider_counts(self) -> None:
        self._check_counters(self.site.owner)

    def _check_counters(self, accounts: Accounts, *, everything: bool = False) -> None:
        site = self.site
        for tenant in ("acme", "beta"):
            known = site.told(len(site.log)).values() if everything else site.known(tenant)
            known = [truth for truth in known if truth.asked.tenant == tenant]
            counters = accounts.counters(tenant)
            for scope in ("", "key k1", "key k2"):
                here = [truth for truth in known if scope in ("", f"key {truth.asked.key}")]
                counter = counters.get(scope, NEW)
                standing = [truth for truth in here if truth.used is None]
                assert counter.running == len(standing)
                assert counter.held == sum(truth.charged for truth in standing)
                assert counter.requests_total == len(here)
                assert counter.tokens_total == sum(truth.used or 0 for truth in here)
                for window in Window:
                    for unit in (Unit.REQUESTS, Unit.TOKENS):
                        used = counter.used(window, unit, site.newest_ms)
                        assert in_use(here, window, unit, site.newest_ms) <= used
                        assert used <= in_use(here, window, unit, site.newest_ms, LATER_MS)

    def _check_recovered(self, accounts: Accounts) -> None:
        """It is as one that read everything, and knows of every record that may come again what was decided of it."""
        site, whole = self.site, Accounts(INTERACTIVE)
        follow(whole, site.log, len(site.log))
        self._check_counters(accounts, everything=True)
        self._check_counters(whole, everything=True)
        for event in site.newest(InferenceAdmitted, InferenceRejected, InferenceFailed):
            offsets = [len(site.requests)]
            if not isinstance(event, InferenceFailed):
                offsets.append(event.source.offset)
            for offset in offsets:
                where = event.tenant, event.request_id, offset
                assert accounts.standing(*where) == whole.standing(*where)
        for offset, asked in enumerate(site.requests[site.committed :], site.committed):
            where = asked.tenant, asked.request_id, offset
            assert accounts.standing(*where) == whole.standing(*where)

    def teardown(self) -> None:
        """At rest, what is charged is what was used, and nothing is held."""
        site = self.site
        try:
            site.end_all(0.5)
            for accounts in (site.owner, site.recovered(Random(1))):
                self._check_counters(accounts, everything=True)
                counters = [counter for tenant in accounts.tenants().values() for counter in tenant.values()]
                assert not any(counter.running or counter.held for counter in counters)
        finally:
            self.patched.stop()


TestAnyInterleaving = AnyInterleaving.TestCase
TestAnyInterleaving.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
