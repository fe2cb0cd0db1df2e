"""The pages of the KV pool: a free-list and nothing else.

Contract: every page is either free or held by exactly one sequence. Keys and values are never shared between
sequences, so a variant cannot see those of another variant, or of the base (llama.cpp#26207, sglang#24638):
there is no prefix cache to be keyed wrongly. Stale values in a page handed out again are harmless: a token
reads only positions that its own sequence has written.
"""

from __future__ import annotations


class PagePool:
    """Page numbers `0` to `pages - 1`."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        assert pages > 0
        assert page_tokens > 0
        self.total = pages
        self.page_tokens = page_tokens
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-tokens // self.page_tokens)

    def take(self, count: int) -> list[int]:
        """Hand out pages. The caller has looked at `free`."""
        assert count <= len(self._free), (count, len(self._free))
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Take pages back; the list is emptied."""
        self._free.extend(pages)
        pages.clear()
        assert len(self._free) <= self.total
