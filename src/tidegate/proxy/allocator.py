"""Keeps the C allocator from giving memory back to the system between requests.

A body of a few hundred KB is above glibc's thresholds: each one is mapped, faulted in page by page, and unmapped. With
32k token ids a request that costs 60 us of the kernel's time for nothing else. These thresholds let freed bodies be
used again; at most TRIM_BYTES are kept. Elsewhere than on glibc this does nothing.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
TRIM_BYTES = 134_217_728  # free memory at the heap's top before it is given back
MMAP_BYTES = 16_777_216  # allocations that are mapped by themselves: bodies so long that a few faults do not matter


def keep_freed_memory() -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
    mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
