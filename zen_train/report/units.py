"""Figures as people read them: one place, so that the terminal, the page, the card and the picture agree.

Every function gives a dash for None. Does no rounding that changes a comparison: losses keep four decimals.
"""

DASH = "–"


def loss_text(loss: float | None) -> str:
    """A loss in nats per token with four decimals."""
    return DASH if loss is None else f"{loss:.4f}"


def perplexity_text(perplexity: float | None) -> str:
    """Three significant digits, in exponent form from one million on."""
    if perplexity is None:
        return DASH
    if perplexity >= 1e6:
        return f"{perplexity:.2e}"
    return f"{perplexity:,.0f}" if perplexity >= 1000 else f"{perplexity:.3g}"


def bytes_text(count_bytes: int | None) -> str:
    """Decimal units as on a disk's label: 1 MB is 1,000,000 bytes."""
    if count_bytes is None:
        return DASH
    value = float(count_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def seconds_text(seconds: float | None) -> str:
    """`0.4 s`, `42 s`, `3 min 20 s`, `5 h 12 min`."""
    if seconds is None:
        return DASH
    if seconds < 9.95:
        return f"{seconds:.2g} s" if seconds < 0.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def count_text(count: int | float | None) -> str:
    """`950`, `61.4k`, `134.5M`, `70.6B`."""
    if count is None:
        return DASH
    value = float(count)
    for unit in ("", "k", "M", "B"):
        if abs(value) < 999.5:
            return (
                f"{value:.0f}"
                if unit == ""
                else f"{value:.4g}{unit}"
                if value >= 100
                else f"{value:.3g}{unit}"
            )
        value /= 1000
    return f"{value:.3g}T"


def share_text(share: float | None) -> str:
    """A share as a percentage with one decimal; may be negative or above 100 %."""
    return DASH if share is None else f"{share * 100:.1f} %"


def ratio_text(ratio: float | None) -> str:
    """`15.3×`."""
    return DASH if ratio is None else f"{ratio:.3g}×" if ratio < 1000 else f"{ratio:,.0f}×"


def bits_text(bits: float | None) -> str:
    """Bits with two decimals."""
    return DASH if bits is None else f"{bits:.2f}"
