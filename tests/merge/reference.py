"""Float64 references for the merge rules, written from the formulas alone, and matrices to try them on."""

import math

import torch


def orthogonal(size, generator):
    """Random orthogonal [size, size], float64."""
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q


def with_spectrum(m, n, s, seed):
    """Float32 [m, n] whose singular values are `s` (up to rounding)."""
    generator = torch.Generator().manual_seed(seed)
    p = min(m, n)
    u, v = orthogonal(m, generator)[:, :p], orthogonal(n, generator)[:, :p]
    return (u @ torch.diag(torch.as_tensor(s, dtype=torch.float64)) @ v.T).float()


def signal_and_noise(m, n, seed, *, signal_rank=6, noise=0.05):
    """Float32 [m, n] like a real fine-tuning delta: a few strong directions over a flat floor."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(m, signal_rank, generator=generator)
    right = torch.randn(signal_rank, n, generator=generator)
    strength = torch.logspace(0, -1, signal_rank)
    floor = torch.randn(m, n, generator=generator)
    return 1e-3 * (left * strength @ right + noise * floor)


def matrices():
    """(name, float32 matrix) pairs: both orientations, and the spectra on which a Gram matrix is weakest."""
    generator = torch.Generator().manual_seed(0)
    wide = {"80x50": (80, 50), "50x80": (50, 80), "64x64": (64, 64)}
    for label, (m, n) in wide.items():
        p = min(m, n)
        yield f"gaussian-{label}", torch.randn(m, n, generator=generator)
        yield f"signal-{label}", signal_and_noise(m, n, 1)
        yield f"ill-conditioned-{label}", with_spectrum(m, n, torch.logspace(0, -7, p), 2)
        yield f"rank3-{label}", with_spectrum(m, n, [3.0, 2.0, 1.0] + [0.0] * (p - 3), 3)
        yield f"equal-values-{label}", with_spectrum(m, n, [1.0] * p, 4)
    yield "zero", torch.zeros(20, 12)
    yield "1xN", torch.randn(1, 40, generator=generator)
    yield "Nx1", torch.randn(40, 1, generator=generator)
    yield "1x1", torch.randn(1, 1, generator=generator)
    yield "2x3", torch.randn(2, 3, generator=generator)
    yield "huge", 1e30 * torch.randn(30, 20, generator=generator)
    yield "tiny", 1e-30 * torch.randn(30, 20, generator=generator)


def best_error(matrix, rank):
    """Frobenius norm of `matrix` minus its best rank-`rank` approximation (Eckart and Young)."""
    s = torch.linalg.svdvals(matrix.double())
    return float(s[rank:].square().sum().sqrt())


def truncated(matrix, rank):
    """Best rank-`rank` approximation, float64."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u[:, :rank] @ torch.diag(s[:rank]) @ vh[:rank]


def svd_average(base, checkpoints, rank):
    """`W0 + (1/k) sum tau_i`, float64."""
    tau = [truncated(w.double() - base.double(), rank) for w in checkpoints]
    return base.double() + sum(tau) / len(tau)


def monosoup(base, checkpoints, energy=None):
    """(weight, k, lam_low) of arXiv 2602.09689 on the mean task vector, float64, as formulas.md writes it."""
    w0 = base.double()
    delta = sum(w.double() for w in checkpoints) / len(checkpoints) - w0
    u, s, vh = torch.linalg.svd(delta, full_matrices=False)
    values = [float(x) for x in s]
    squares = [x * x for x in values]
    if energy is None:
        total = sum(values)
        entropy = -sum(x / total * math.log(x / total) for x in values if x > 0.0)
        k = min(max(math.ceil(math.exp(entropy)), 1), len(values))
    else:
        k = next(i for i in range(1, len(values) + 1) if sum(squares[:i]) >= energy * sum(squares))
    p_k = sum(squares[:k]) / sum(squares)
    rho = 0.0 if k == len(values) else (values[k] / values[0]) ** 2
    cos = math.sqrt(max(0.0, 1.0 - p_k))
    lam_low = min(max(rho + (1.0 - rho) * cos, 0.0), 1.0)
    lam_high = min(max(1.0 - lam_low, 0.0), 1.0)
    high = u[:, :k] @ torch.diag(s[:k]) @ vh[:k]
    low = u[:, k:] @ torch.diag(s[k:]) @ vh[k:]
    return w0 + lam_high * high + lam_low * low, k, lam_low


def relative_error(got, want, scale=None):
    """`||got - want|| / ||scale or want||`, float64; 0 / 0 is 0."""
    error = float((got.double() - want.double()).norm())
    size = float((want if scale is None else scale).double().norm())
    return 0.0 if error == 0.0 else error / size if size > 0.0 else math.inf
