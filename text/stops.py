"""Finds the first of several stop strings in text that arrives piece by piece.

An Aho-Corasick automaton over the stop strings. Its state is one integer: which node, that is, the longest suffix of
the text so far that begins some stop string and isn't a whole one. That suffix is exactly what must be held back, so
the state says both where a match stands and what a reader may not see yet. A character costs amortised constant time,
however long or many the stop strings are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

ROOT = 0


class Match(NamedTuple):
    """The first match in a piece of text: `stop` ends just before `end`, counted in characters of that piece."""

    stop: str
    end: int


class StopMatcher:
    """An immutable automaton for `stops`, none of them empty. Of matches that end first, the first listed wins."""

    __slots__ = ("_children", "_fail", "_held", "_match")

    def __init__(self, stops: Sequence[str]) -> None:
        """Build it, in time and space linear in the length of all stop strings."""
        self._children: list[dict[str, int]] = [{}]
        self._fail: list[int] = [ROOT]
        self._held: list[tuple[str, int]] = [("", 0)]  # (a stop string, how many of its characters the node stands for)
        self._match: list[tuple[int, str] | None] = [None]  # (place in the list, stop string)
        for place, stop in enumerate(stops):
            self._insert(place, stop)
        self._link()

    def held(self, node: int) -> str:
        """The text that `node` stands for: the last characters seen, which may be the beginning of a stop string."""
        stop, length = self._held[node]
        return stop[:length]

    def search(self, node: int, text: str) -> tuple[int, Match | None]:
        """Read `text` from `node` on, up to the first match. Return the new node, and the match if there is one."""
        for position, character in enumerate(text):
            node = self._next(node, character)
            match = self._match[node]
            if match is not None:
                return node, Match(match[1], position + 1)
        return node, None

    def skip(self, node: int, text: str) -> int:
        """Read `text` from `node` on without looking for matches that end in it. Return the new node."""
        for character in text:
            node = self._next(node, character)
        # A whole stop string that doesn't count isn't held, only what may still grow into another.
        while node != ROOT and not self._children[node]:
            node = self._fail[node]
        return node

    def _insert(self, place: int, stop: str) -> None:
        node = ROOT
        for length, character in enumerate(stop, start=1):
            child = self._children[node].get(character)
            if child is None:
                child = len(self._children)
                self._children[node][character] = child
                self._children.append({})
                self._fail.append(ROOT)
                self._held.append((stop, length))
                self._match.append(None)
            node = child
        if self._match[node] is None:
            self._match[node] = (place, stop)

    def _link(self) -> None:
        """Set each node's fail link, parents first, and let a node also match what its fail link matches."""
        queue = deque(self._children[ROOT].values())
        while queue:
            node = queue.popleft()
            inherited = self._match[self._fail[node]]
            own = self._match[node]
            if inherited is not None and (own is None or inherited[0] < own[0]):
                self._match[node] = inherited
            for character, child in self._children[node].items():
                self._fail[child] = self._next(self._fail[node], character)
                queue.append(child)

    def _next(self, node: int, character: str) -> int:
        while character not in self._children[node]:
            if node == ROOT:
                return ROOT
            node = self._fail[node]
        return self._children[node][character]
