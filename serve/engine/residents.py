"""Which variants are on the device, and who uses them: the little state that several threads share, under
one lock.

Contract: a hash is loading, resident or unknown. Jobs are counted from their acceptance until their last
event is about to be delivered; a variant with jobs is never taken away.
"""

from __future__ import annotations

import threading
from collections import Counter

from zen_train.serve.engine.slots import BASE_PLACE, Place
from zen_train.serve.errors import ConflictError


class Residents:
    """Places by content hash; `None` is the base, always there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[str | None, Place] = {None: BASE_PLACE}
        self._loading: set[str] = set()
        self._jobs: Counter[str | None] = Counter()
        self._job_ids: set[str] = set()

    def accept(self, job_id: str, content_hash: str | None) -> Place:
        """Count a new job. Raises ValueError for a variant that is not loaded, or an id in use."""
        with self._lock:
            if content_hash not in self._places:
                raise ValueError(f"variant {content_hash} is not loaded; load it first")
            if job_id in self._job_ids:
                raise ValueError(f"job {job_id!r} exists already; give each job an id of its own")
            self._job_ids.add(job_id)
            self._jobs[content_hash] += 1
            return self._places[content_hash]

    def ended(self, job_id: str, content_hash: str | None) -> None:
        """A job needs its variant no more."""
        with self._lock:
            self._job_ids.remove(job_id)
            self._jobs[content_hash] -= 1

    def begin_load(self, content_hash: str) -> bool:
        """Claim a load. False: it is resident already. Raises ConflictError while another load of it runs."""
        with self._lock:
            if content_hash in self._places:
                return False
            if content_hash in self._loading:
                raise ConflictError(f"variant {content_hash} is being loaded; wait for that load")
            self._loading.add(content_hash)
            return True

    def end_load(self, content_hash: str, place: Place | None) -> None:
        """The load is over; with a place the variant is resident from now on."""
        with self._lock:
            self._loading.discard(content_hash)
            if place is not None:
                self._places[content_hash] = place

    def take_out(self, content_hash: str) -> Place:
        """End a residency. Raises ValueError for a variant that is not resident or has jobs."""
        with self._lock:
            if content_hash not in self._places:
                raise ValueError(f"variant {content_hash} is not loaded; there is nothing to unload")
            if self._jobs[content_hash]:
                raise ValueError(
                    f"variant {content_hash} has {self._jobs[content_hash]} jobs; let them end, or cancel them, first"
                )
            return self._places.pop(content_hash)

    def planes(self) -> dict[str, int]:
        """content hash -> slots it takes."""
        with self._lock:
            return {name: len(place.planes) for name, place in self._places.items() if name is not None}
