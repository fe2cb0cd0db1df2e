"""95 % intervals of the share of problems solved, and of how much more another model solves."""

from __future__ import annotations

from math import prod, sqrt

Z_95 = 1.959964


def wilson(right: int, problems: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, in percent."""
    share, z2 = right / problems, Z_95**2
    middle = (share + z2 / (2 * problems)) / (1 + z2 / problems)
    half = Z_95 * sqrt(share * (1 - share) / problems + z2 / (4 * problems**2)) / (1 + z2 / problems)
    return 100 * max(0.0, middle - half), 100 * min(1.0, middle + half)


def paired(before: str, after: str) -> tuple[float, tuple[float, float]]:
    """Points by which `after` solves more of the same problems, with Newcombe's 95 % interval for paired shares (1998):
    made of Wilson's, and honest also where hardly a problem is solved, where a bootstrap shrinks to nothing.
    """
    pairs = [(int(a), int(b)) for a, b in zip(after, before, strict=True)]
    both, only_after, only_before, neither = (pairs.count(p) for p in ((1, 1), (1, 0), (0, 1), (0, 0)))
    scores = [both + only_after, both + only_before]
    shares = [100 * score / len(pairs) for score in scores]
    (low_a, high_a), (low_b, high_b) = (wilson(score, len(pairs)) for score in scores)
    margins = prod(scores) * prod(len(pairs) - score for score in scores)
    phi = (both * neither - only_after * only_before) / sqrt(margins) if margins else 0.0

    def width(x: float, y: float) -> float:
        return sqrt(x * x - 2 * phi * x * y + y * y)

    gain = shares[0] - shares[1]
    low = gain - width(shares[0] - low_a, high_b - shares[1])
    return gain, (low, gain + width(high_a - shares[0], shares[1] - low_b))
