"""The layout of work: items, queues and the merge map.

The one thing planner, kernels and runtime share. A *unit* is one (request, KV head, query tile)
with the KV range it can see; the planner cuts units into *items* only where cutting pays and deals
the items to CTAs (on a CPU: threads). Query rows are *fused*: with `G = num_qo_heads //
num_kv_heads`, fused row `r` of KV head `h` is query token `r // G` of the request and query head
`h * G + r % G`, so that all query heads sharing a KV head share its loads.

Arrays (all int32):

===============  =====================  =========================================================
name             shape                  meaning
===============  =====================  =========================================================
``items``        [num_items, 8]         one work item a row, see `Item`; the items of a CTA stand
                                        next to each other
``cta_indptr``   [num_ctas + 1]         items of CTA ``c`` are ``cta_indptr[c]:cta_indptr[c+1]``
``merge_items``  [num_merges, 4]        (request, kv_head, row_begin, row_end) of each cut unit
``merge_indptr`` [num_merges + 1]       slots of cut unit ``m``, in KV order and consecutive
``header``       [`HEADER_WORDS`]       counts and the verdict of validation, see `Header`
===============  =====================  =========================================================
"""

from __future__ import annotations

from enum import IntEnum

ITEM_WORDS = 8
MERGE_WORDS = 4
HEADER_WORDS = 32
NO_SLOT = -1
"""Slot of an uncut unit: its item writes straight to the output."""
SEEN_BITS = 16
"""Bits of each half of `Item.SEEN`."""
MAX_SEEN = 2**15 - 1
"""Granules that it can tell of; keys after those are masked one by one."""
READ_BEYOND = 32
"""Bytes after a bitmap's last that may be read, as it is read by words, a block of keys at once."""
ALONE = 72
"""CTAs that it takes to have all of a GPU's memory's speed, more or less."""
CROWD = 2
"""Pieces for each queue that are as many as there may be, where few units are shared out."""
MERGE_TOKENS = 2**14
"""Tokens of a head that are read, at the memory's speed, while parts are merged."""


class Item(IntEnum):
    """Columns of ``items``."""

    REQUEST = 0
    KV_HEAD = 1
    ROW_BEGIN = 2  # first fused row of the query tile
    ROW_END = 3  # one past the last; at most qo_len * G
    KV_BEGIN = 4  # first KV token (index within the request) of this piece
    KV_END = 5
    SLOT = 6  # partial state to write, or NO_SLOT
    SEEN = 7  # of bitmaps: the granules whose bits are all set, the first | one past the last << 16


class Merge(IntEnum):
    """Columns of ``merge_items``."""

    REQUEST = 0
    KV_HEAD = 1
    ROW_BEGIN = 2
    ROW_END = 3


class Header(IntEnum):
    """Words of ``header``, written by the planner."""

    STATUS = 0  # a `Status`
    WHERE = 1  # request or index the status speaks of
    VALUE = 2  # the offending value
    NNZ_QO = 3  # query tokens of the batch
    MAX_PAGE = 4  # largest page id referenced, -1 if none
    MAX_QO_LEN = 5
    MAX_KV_LEN = 6
    UNITS_SHORT = 7  # (request, tile) pairs of the short family, before KV heads
    UNITS_LONG = 8
    NUM_ITEMS = 9  # of the work list just planned
    NUM_SLOTS = 10
    NUM_MERGES = 11
    MAX_LOAD = 12  # cost of the longest CTA
    TOTAL_LOAD_LO = 13  # int64 sum of all costs, two words
    TOTAL_LOAD_HI = 14
    MAX_UNIT = 15  # cost of the longest uncut unit
    NUM_TOKENS_LO = 16  # int64 KV tokens of the batch
    NUM_TOKENS_HI = 17
    NUM_PAGES = 18  # page ids in use
    FAMILY = 19  # of `plan_short`: place of the family that has the work, -1 if it was not dealt


class Status(IntEnum):
    """Verdict of the planner's validation."""

    OK = 0
    QO_INDPTR = 1  # qo_indptr does not start at 0 or decreases; WHERE = position
    KV_INDPTR = 2
    KV_INDICES_SHORT = 3  # kv_indptr[-1] is more than len(kv_indices)
    KV_INDEX = 4  # a negative page id; WHERE = position
    LAST_PAGE_LEN = 5  # not in 1..page_size for a request that has pages; WHERE = request
    TOO_LONG = 6  # lengths whose product passes int32: fused rows or KV tokens of one request
    ITEMS_FULL = 7  # more items than the buffer holds (sized from `limits`)
    SLOTS_FULL = 8
    MERGES_FULL = 9
    QO_LIMIT = 10  # of a plan on a device: qo_indptr[-1] is more than `max_qo_tokens`
    KV_LIMIT = 11  # kv_indptr[-1] is more than the pages of `max_kv_tokens`
    QO_LEN = 12  # a request has more queries than `max_qo_len`; WHERE = request
    NO_PAGE = 13  # a page id that the cache does not have; WHERE = position
    OVER_LIMIT = 14  # of `plan_short`: more requests, query tokens or pages than there is room for


class Place(IntEnum):
    """Words that say where, in a plan's memory on a device, the arrays of a batch begin."""

    QO_INDPTR = 0
    KV_INDPTR = 1
    KV_INDICES = 2
    KV_LEN = 3
    Q_POS_OFFSET = 4
    KV_POS_OFFSET = 5
    HEADER = 6
    ARRIVALS = 7  # CTAs of a launch that have copied page ids
    FIRST_BAD = 8  # INT32_MAX less the position of the first bad page id, 0 if there is none
    PLANNED = 9  # CTAs of all launches that have planned
    EXPECTED = 10  # and how many these are once the last launch is done


class Job(IntEnum):
    """Words that say what a device has to plan of a family, and where in a plan's memory."""

    ITEMS = 0
    CTA_INDPTR = 1
    MERGE_ITEMS = 2
    MERGE_INDPTR = 3
    HEADER = 4
    UNIT_ROWS = 5  # scratch: rows of 8 words, units and the pieces they are cut in
    PIECE_ROWS = 6
    MERGES = 7  # merges there is room for
    NUM_CTAS = 8
    ROW_MIN = 9
    ROW_MAX = 10
    TILE_ROWS = 11
    GRANULE = 12
    OVERHEAD = 13
    ROLE = 14  # a `Role`
    OF_HEADS = 16  # reciprocals, two words each: of KV heads, of the granule, of the group size,
    OF_GRANULE = 18
    OF_GROUP = 20
    OF_CTAS = 22  # and of the number of CTAs


class Term(IntEnum):
    """Words that say what `plan_short` is to plan for, and where in a block of memory it writes."""

    PAGE_SIZE = 0
    GROUP_SIZE = 1
    NUM_KV_HEADS = 2
    SHORT_ROWS = 3  # as for `plan_batch`
    LONG_ROWS = 4
    MAX_BATCH = 5
    MAX_QO_TOKENS = 6
    MAX_PAGES = 7
    ROWS = 8  # most fused rows of a request that it deals; none is dealt if it is -1
    WAY = 9  # a `Way`
    USUAL = 10  # the place of the family that takes batches, unless it is one of few units
    FEW = 11  # how many units are few
    QO_INDPTR = 12
    KV_INDPTR = 13
    KV_INDICES = 14
    KV_LEN = 15
    Q_POS_OFFSET = 16
    KV_POS_OFFSET = 17
    REQUESTS = 18  # room
    PAGES = 19


class Way(IntEnum):
    """How the family is chosen that short requests are dealt to."""

    USUAL = 0  # it is the usual one, and cuts as it does
    ONLY = 1  # there is no other; it may leave all units whole, as on a device
    FASTEST = 2  # of few units that of the least time, by an estimate


class Share(IntEnum):
    """Words that say what short requests are dealt to, a row for each family, and where."""

    ITEMS = 0
    CTA_INDPTR = 1
    MERGE_ITEMS = 2
    MERGE_INDPTR = 3
    MAX_ITEMS = 4
    MAX_SLOTS = 5
    MAX_MERGES = 6
    MAX_CTAS = 7
    NUM_CTAS = 8
    TILE_ROWS = 9
    GRANULE = 10
    OVERHEAD = 11
    CACHED_TOKENS = 12
    CLUSTER = 13


class Role(IntEnum):
    """What a family is to a device's planner."""

    ALWAYS = 0
    CLUSTERS = 1  # in clusters: for batches of few units


TERM_WORDS = 20
SHARE_WORDS = 16
JOB_WORDS = 24
PLACE_WORDS = 16
DEVICE_CTAS = 640
"""Most CTAs that a device deals to."""
