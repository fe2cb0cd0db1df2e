"""How far to push scales beyond least squares, because an error along the delta costs more than one across it.

Scales of least squares leave `D_hat = (1 - e) D + N` with N orthogonal to D and e = ||D - D_hat||^2 / ||D||^2: every
matrix keeps only the share 1 - e of its change (0.64 for one bit of a Gaussian). N is noise, and averages out over
columns and layers; the missing share is the same direction everywhere, and adds up. With errors along D counted
`weight` times, the best multiple of those scales is

    argmin over c of  weight * (1 - c (1 - e))^2 + c^2 e (1 - e)   =   weight / (weight - (weight - 1) e)

1 is least squares, mean|D| of the paper (arXiv 2402.10193). With a large weight `D_hat` is unbiased, as DARE's rescaled
deltas are (arXiv 2311.03099); a finite one keeps a row with a few outliers, where e is near 1, from becoming all noise.
Measured on SmolLM2-135M, legal, one bit by row: KL from the fine-tune 0.0283 with 1, 0.0062 with 4, 0.0058 with 8,
0.0062 with 16, 0.0072 without a limit (CHANGELOG.md).
"""

import torch

ALONG_WEIGHT = 8.0
"""What exports count by default, `export.along_weight` too."""


def along_factor(lost: torch.Tensor, weight: float) -> torch.Tensor:
    """The multiple, between 1 and `weight`; `lost` is e, between 0 and 1, of any shape."""
    return weight / (weight - (weight - 1.0) * lost)


def change_sums(d_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of |D| and of D^2 by row, float64 `[N]`; D is float32."""
    return d_NK.abs().sum(dim=1, dtype=torch.float64), d_NK.square().sum(dim=1, dtype=torch.float64)


def along_scale(
    size_N: torch.Tensor, square_N: torch.Tensor, columns: int, weight: float, *, per_row: bool
) -> torch.Tensor:
    """Alpha of each row `[N, 1]` or of the matrix `[1, 1]`, float32, from the rows' sums of |D| and of D^2."""
    count = columns
    if not per_row:
        count *= len(size_N)
        size_N, square_N = size_N.sum()[None], square_N.sum()[None]
    mean_N = size_N / max(count, 1)
    if weight != 1.0:
        kept_N = torch.where(square_N > 0, size_N * mean_N / square_N.clamp_min(1e-38), 1.0).clamp(0.0, 1.0)
        mean_N = mean_N * along_factor(1.0 - kept_N, weight)
    return mean_N.float()[:, None]
