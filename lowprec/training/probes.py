"""What is measured during a run, per layer and head. Probes never raise on non-finite weights.

The error of a W_Q gradient. The backward reads delta = rowsum(dO * O) from the stored O. Read from
the unrounded O it would be smaller by eps = delta_o - delta_ref, so the rounding changes
dS = P * (dP - delta) by -P * eps, row i of dQ by -scale * eps_i * (P K)_i, and the gradient of a
head's W_Q (head_dim, n_embd) by

    e = -scale * sum_i eps_i (P K)_i x_i^T

where x is the normalised input of the projection. One e is small; what matters is whether the e of
many steps point the same way, ||sum e|| against sum ||e||. With qk_norm, e is the error of the
gradient with respect to what the norm puts out, read as if it were W_Q x. With rotary positions row
i of dQ is turned back by the angles of its place before it meets x_i.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch

from lowprec.attention import trace
from lowprec.attention.inputs import outside_autocast
from lowprec.numerics.policy import ALL_FP32, PrecisionPolicy
from lowprec.training.rotary import rotate

QUERY_ERROR_COLUMNS = ("delta_bias", "delta_abs", "error_norm", "sum_norm", "grad_norm")


@torch.no_grad()
def spectral_norms(weights: torch.Tensor) -> torch.Tensor:
    """Largest singular value of each (..., rows, columns) matrix, float64, same device.

    From the smaller Gram matrix G in float64: the trace of G^n, to the power 1/n, lies above G's
    largest eigenvalue by a factor of at most (its size)^(1/n), and n = 2^26 takes 26 squarings.
    That is three relative units in 10^8 for 64 rows, ten times as fast as a decomposition, and it
    never raises: NaN where a weight is not finite, since the failure must be measurable.
    """
    w = weights.double()
    gram = w @ w.mT if w.shape[-2] <= w.shape[-1] else w.mT @ w
    log = torch.zeros(gram.shape[:-2], dtype=torch.float64, device=w.device)
    for i in range(27):
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        log += trace.log() / 2**i
        gram = gram / trace[..., None, None]
        gram = gram @ gram
    top = (log / 2).exp()
    finite = weights.isfinite().all(-1).all(-1)
    return torch.where(finite & top.isnan(), 0.0, torch.where(finite, top, float("nan")))


@outside_autocast
def dq_error(q, k, eps, scale=None, policy=ALL_FP32, impl="auto") -> torch.Tensor:
    """-scale * eps_i * (P K)_i, how an error eps of delta moves dQ.  (B, H, T, D) float32

    q: (B, H, T, D); k: as q, or with fewer heads that are shared; eps: (B, H, T); scale: defaults
    to 1/sqrt(D). P is formed from scores rounded as `policy.s` says, to nearest where that is
    stochastic; the rounding of l, at most half an ulp of P, is left out.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = PrecisionPolicy.parse(policy).s
    policy = ALL_FP32.replace(s=s.fmt.name if s.rounding == "stochastic" else s)
    mean_key = trace(q, k, k, None, policy, scale=scale, impl=impl).o_fp32
    return (-scale * eps[..., None] * mean_key).float()


@outside_autocast
def query_error(q, k, x, eps, rotation=None, **how) -> torch.Tensor:
    """e of each head, (H, D, C) float32, summed over the batch.

    q, k, eps: as in `dq_error`; x: (B, T, C); rotation: the table by which q was turned, see
    `lowprec.training.rotary`; `how` as there.
    """
    b, h, t, d = q.shape
    rows = rotate(dq_error(q, k, eps, **how), rotation, back=True)
    rows = rows.permute(1, 3, 0, 2).reshape(h * d, b * t)
    return (rows @ x.reshape(b * t, -1).float()).view(h, d, -1)


def sketch_signs(seed: int, count: int, head_dim: int, n_embd: int, device=None):
    """a (count, head_dim) and b (count, n_embd) of random signs, float32, from the seed alone.

    a_j^T e b_j has mean square ||e||^2 over the signs, as it would over Gaussian vectors, but
    signs come from raw bits of a counter-based generator, which no library version changes.
    """
    words = -(-count * (head_dim + n_embd) // 64)
    raw = np.random.Philox(key=seed).random_raw(words).astype("<u8").view(np.uint8)
    bits = np.unpackbits(raw)[: count * (head_dim + n_embd)].reshape(count, -1)
    signs = torch.from_numpy(bits.astype(np.float32) * 2 - 1).to(device)
    return signs.split([head_dim, n_embd], dim=1)


class QueryErrorWindow:
    """The error of every W_Q gradient over consecutive steps: its size, its sum, a sketch of it.

    Call `update` for each layer and micro-batch of a step, then `end_step`. Nothing waits for the
    GPU until `to_table`. A step keeps, per layer and head, `QUERY_ERROR_COLUMNS`: sum eps,
    sum |eps|, ||e||_F, ||sum of e over the steps so far||_F (summed in float64), and the norm of
    the gradient if given; and `sketch` numbers a_j^T e b_j / sqrt(sketch), a linear map with
    E ||sketch(e)||^2 = ||e||^2, so that the e of any set of steps can be added afterwards.

    A head whose e is not finite gets NaN for that step, which its running sum leaves out.
    """

    def __init__(self, n_layer, n_head, head_dim, n_embd, sketch=64, seed=0, device="cpu"):
        self.signs = sketch_signs(seed, sketch, head_dim, n_embd, device)
        shape = (n_layer, n_head)
        self.error = torch.zeros(*shape, head_dim, n_embd, device=device)
        self.total = torch.zeros_like(self.error, dtype=torch.float64)
        self.deltas = torch.zeros(*shape, 2, dtype=torch.float64, device=device)
        self.records: list[tuple[int, torch.Tensor]] = []
        self.step = None

    @torch.no_grad()
    def update(self, step, layer, x, q, k, eps, scale=None, **how):
        """Add a micro-batch of one layer.

        x: (B, T, C); q, k: as in `query_error`; eps: (B, H, T), delta_o - delta_ref, in the units
        of dO: where the batch's gradient is the mean over n micro-batches, eps must be divided by
        n.
        how: rotation, policy and impl, as in `query_error`.
        """
        if self.step not in (None, step):
            raise ValueError(f"step {self.step} has not ended; call end_step before step {step}")
        self.step = step
        self.error[layer] += query_error(q, k, x, eps, scale=scale, **how)
        eps = eps.double()
        self.deltas[layer] += torch.stack([eps.sum((0, 2)), eps.abs().sum((0, 2))], -1)

    @torch.no_grad()
    def end_step(self, step, grad_norm=None):
        """Record the step and start the next.

        grad_norm: (layers, heads) norms of the W_Q gradients, to compare with ||e||.
        """
        if self.step != step:
            raise ValueError(f"step {step} has no update; the last one was for {self.step}")
        finite = self.error.isfinite().all(-1).all(-1)
        self.total += torch.where(finite[..., None, None], self.error, 0.0)
        size, of_sum = (torch.linalg.vector_norm(e.double(), dim=(-2, -1))
                        for e in (self.error, self.total))  # fmt: skip
        size = torch.where(finite, size, float("nan"))
        grad_norm = torch.full_like(size, float("nan")) if grad_norm is None else grad_norm
        columns = [*self.deltas.unbind(-1), size, of_sum, grad_norm.to(size)]
        a, b = self.signs
        sketch = ((a @ self.error) * b).sum(-1) / len(a) ** 0.5
        record = torch.cat([torch.stack(columns, -1).float(), sketch], -1)
        self.records.append((step, record))
        self.error.zero_()
        self.deltas.zero_()
        self.step = None

    def to_table(self) -> pd.DataFrame:
        """One row per step, layer and head: step, layer, head, QUERY_ERROR_COLUMNS (float32) and
        sketch_00, sketch_01 ... (float16, in units of the row's error_norm, which keeps them
        within that format's range). `sketched_sum` puts them together again."""
        n_layer, n_head = self.deltas.shape[:2]
        width = len(QUERY_ERROR_COLUMNS)
        shape = (0, n_layer, n_head, width + len(self.signs[0]))
        values = torch.stack([r for _, r in self.records]) if self.records else torch.empty(shape)
        values = values.cpu().numpy()
        steps = np.array([step for step, _ in self.records], dtype=np.int32)
        step, layer, head = np.broadcast_arrays(
            steps[:, None, None], *np.ogrid[:n_layer, :n_head]
        )  # fmt: skip
        keys = dict(step=step.ravel(), layer=layer.ravel().astype(np.int16),
                    head=head.ravel().astype(np.int16))  # fmt: skip
        rows = values.reshape(-1, values.shape[-1])
        numbers = dict(zip(QUERY_ERROR_COLUMNS, rows[:, :width].T, strict=True))
        size = numbers["error_norm"][:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(size == 0, 0, rows[:, width:] / size).astype(np.float16)
        sketch = {f"sketch_{j:02d}": column for j, column in enumerate(relative.T)}
        return pd.DataFrame(keys | numbers | sketch)


def sketched_sum(table: pd.DataFrame) -> pd.DataFrame:
    """Sum of e over the steps of a table from `to_table`, from the sketches alone.

    One row per layer and head: sum_norm, an estimate of ||sum e||; error_norm, sum ||e||; and
    coherence, their ratio: 1 where all steps push the same way, 1/sqrt(steps) for independent
    ones. The estimate's relative standard deviation is at most sqrt(2/sketch), 18 % for 64.
    """
    names = [name for name in table if name.startswith("sketch_")]
    absolute = table[names].astype(np.float64).mul(table["error_norm"].astype(np.float64), axis=0)
    by = [table["layer"], table["head"]]
    summed = absolute.groupby(by).sum(min_count=1)
    result = pd.DataFrame({"sum_norm": np.sqrt((summed**2).sum(axis=1, min_count=1))})
    result["error_norm"] = table["error_norm"].astype(np.float64).groupby(by).sum()
    result["coherence"] = result["sum_norm"] / result["error_norm"]
    return result.reset_index()
