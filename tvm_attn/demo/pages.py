"""The pages of the KV cache: which are free, which are held, and by whom."""

from __future__ import annotations

from collections.abc import Iterable

from tvm_attn.errors import TvmAttnError


class PageError(TvmAttnError, RuntimeError):
    """Pages are taken that are not there, or given back by one who does not hold them."""


class PagePool:
    """A free list of pages that knows the holder of every page.

    Parameters
    ----------
    num_pages : int
        Pages of the cache.

    Attributes
    ----------
    high_water : int
        The most pages ever held at once.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.high_water = 0
        self._free = list(range(num_pages))
        self._holder: dict[int, int] = {}

    @property
    def num_held(self) -> int:
        """Pages held now."""
        return len(self._holder)

    def take(self, count: int, holder: int) -> list[int]:
        """Return `count` free pages, now held by the request `holder`.

        Raises
        ------
        PageError
            If fewer are free.
        """
        if count > len(self._free):
            raise PageError(
                f"request {holder} needs {count} pages, {len(self._free)} of {self.num_pages} are "
                "free; enlarge the cache or admit fewer requests"
            )
        pages = [self._free.pop() for _ in range(count)]
        self._holder.update(dict.fromkeys(pages, holder))
        self.high_water = max(self.high_water, self.num_held)
        return pages

    def give_back(self, pages: Iterable[int], holder: int) -> None:
        """Free pages of the request `holder`.

        Raises
        ------
        PageError
            If the request does not hold one of them.
        """
        for page in pages:
            if self._holder.get(page) != holder:
                raise PageError(
                    f"request {holder} gives back page {page}, "
                    f"which {self._holder.get(page, 'nobody')} holds"
                )
            del self._holder[page]
            self._free.append(page)

    def leaked(self, alive: Iterable[int]) -> list[int]:
        """Return the pages whose holder is not among the requests `alive`, or that got lost."""
        living = set(alive)
        lost = set(range(self.num_pages)) - set(self._free) - set(self._holder)
        orphans = {page for page, holder in self._holder.items() if holder not in living}
        return sorted(lost | orphans)
