"""What was decided is known for as long as its record may come again. How long that is depends on how far is read ahead, and on no deadline."""

from __future__ import annotations

from decisions.accounts import Accounts
from decisions.lanes import PARKED_MAX
from decisions.recalled import RECALLED_RECORDS, TOLD_MAX, Standing
from schemas.events import InferenceRejected
from schemas.topics import DAY_MS, INTERACTIVE
from streams.accounts import SAVE_S
from streams.faust_shell import AHEAD_MAX, AHEAD_PARKED_MAX, BUFFERED_RECORDS_MAX, POLLED_RECORDS_MAX
from tests.decisions.ledger_site import saved
from tests.decisions.ledgers import Asked, admitted, ending, rejected
from tests.decisions.telling import NOTHING, RUNS, R, in_all, restored, tell, told
from tests.decisions.worlds import NOW

READ_STILL = BUFFERED_RECORDS_MAX + POLLED_RECORDS_MAX
"""Records that come after it was said that no more shall."""
UNDONE_MAX = AHEAD_PARKED_MAX + PARKED_MAX + 2 * READ_STILL
"""Records of a partition from the oldest on that isn't done: all that is parked may have been taken up again and decided, but that one."""
DECIDED_A_SECOND = 5_000
"""More than one admission can."""


def refusal(number: int) -> InferenceRejected:
    """What is told of the record at this offset."""
    return rejected(Asked(NOW, f"r{number}", 5, "k1"), number)


def test_no_refusal_is_forgotten_while_its_record_may_come_again() -> None:
    """The record before them all isn't done. A day passes meanwhile, and what is committed no more than that is saved twice."""
    assert AHEAD_PARKED_MAX >= AHEAD_MAX
    assert UNDONE_MAX + RECALLED_RECORDS + SAVE_S * DECIDED_A_SECOND <= TOLD_MAX
    accounts = Accounts(INTERACTIVE)
    tell(accounts, *map(refusal, range(1, UNDONE_MAX // 2)))
    saved(accounts, 0, NOW)
    tell(accounts, *map(refusal, range(UNDONE_MAX // 2, UNDONE_MAX)), at_ms=NOW + DAY_MS)
    mark = saved(accounts, 0, NOW + DAY_MS)[-1]
    for number in (1, UNDONE_MAX // 2, UNDONE_MAX - 1):
        assert accounts.standing("acme", f"r{number}", number) == (Standing.REDELIVERED, refusal(number))
    assert restored([mark]).start == 0, "who has the partition next hears of all of them"


def test_an_id_that_was_refused_long_ago_is_judged_anew_and_its_streams_one_ending_says_what_it_costs() -> None:
    """Its first record is committed, so this is another. The stream was closed by the refusal, so the ending is that of what ran for nobody."""
    accounts = told(rejected(R, 7))
    tell(accounts, None, first=RECALLED_RECORDS + 1)
    saved(accounts, 7, NOW)
    assert accounts.standing("acme", "r", 9) == (Standing.REPEATED, rejected(R, 7))
    saved(accounts, 8, NOW)
    assert accounts.standing("acme", "r", 9) == (Standing.NEW, None)
    tell(accounts, admitted(R, 9))
    assert in_all(accounts) == RUNS
    tell(accounts, ending("r", 0, source="admission"))
    assert in_all(accounts) == NOTHING
