"""The emulation against book/notation.md: its equations and its table of random words, written down
a second time. Every intermediate is the same bit by bit, with a format of its own at every site, so
that a rounding which is left out, made twice or made with another's words shows."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import family

from lowprec.attention.reference import emulate
from lowprec.numerics.formats import keyed_bits, round_to
from lowprec.numerics.policy import SITES, PrecisionPolicy


class Rounding:
    """rnd_f of the equations, and the places that random words are drawn for."""

    def __init__(self, q, keys, policy, seed):
        self.policy, self.seed, self.rows = policy, seed, (*q.shape[:3], 1)
        self.key, self.place = torch.arange(keys), torch.arange(q.shape[3])
        self.query = torch.arange(q.shape[2])[:, None]
        self.head = torch.arange(q.shape[1])[:, None, None]
        self.batch = torch.arange(q.shape[0])[:, None, None, None]

    def words(self, site, shape, row, column):
        column = torch.as_tensor(column)
        return keyed_bits(self.seed, site, self.batch, self.head, row, column).expand(shape)

    def __call__(self, name, x, column, row=None):
        site = getattr(self.policy, name)
        if site.fmt.name == "fp32":
            return x
        bits, row = None, self.query if row is None else row
        if site.rounding == "stochastic":
            bits = self.words(SITES.index(name), x.shape, row, column)
        return round_to(x, site.fmt, site.rounding, bits=bits)


def shifted(r, tied, shift, u):
    """shift(r); u: the row's draw from [0, 1)."""
    return {
        "none": r,
        "beta": torch.where(tied, torch.where(r > 0, shift.beta, shift.gamma) * r, r),
        "mute": torch.where(tied & (r > shift.amplitude), 1e30, r),
        "offset": r + shift.amplitude,
        "dither": r + shift.amplitude * u,
        "pow2": (r / LN2).ceil() * LN2,
    }[shift.kind]


def forward(q, k, v, rnd, tile, causal, c):
    """For rows that see their first key in the first block."""
    p, key, keys, d = rnd.policy, rnd.key, k.shape[2], k.shape[3]
    visible = (rnd.query >= key) if causal else (rnd.query >= 0) & (key >= 0)
    u = (rnd.words(12, rnd.rows, rnd.query, 0) / 2**32).float()
    m, l, o_acc = torch.tensor(-math.inf), torch.zeros(()), torch.zeros(d)  # noqa: E741
    l_lse, l_star, o_star, blocks = l, l, o_acc, []
    for j, block in enumerate(key.split(tile)):
        seen, at = visible[:, block], 3 * d * j + rnd.place
        sees = seen.any(-1, keepdim=True)
        s = rnd("s", q @ k[:, :, block].mT, block)
        s = rnd("s", c * s, keys + block).where(seen, -math.inf)
        r = s.amax(-1, keepdim=True)
        tied = (s >= r - p.shift.tol).sum(-1, keepdim=True) > 1
        before, m = m, torch.maximum(m, torch.where(sees, shifted(r, tied, p.shift, u), r))
        x, alpha = rnd("x", s - m, block), rnd("x", before - m, keys + j).exp()
        p_bar = x.exp()
        if p.shift.kind == "pow2":
            t, most, least = s * (1 / LN2), (m / LN2).round(), (before / LN2).round()
            fraction = torch.exp2((t - t.round()).double()).float()
            p_bar = (fraction * torch.exp2((t.round() - most).double())).float().nan_to_num(0.0)
            alpha = torch.exp2((least - most).double()).float()
        p_hat = rnd("p", p_bar, block)
        t_bar, t = (x.sum(-1, keepdim=True) for x in (p_bar, p_hat))
        t_bar, t = (torch.where(sees, x.clamp(min=p.l_floor), x) for x in (t_bar, t))
        t = t_bar if p.l_from == "p_unnorm" else t
        pv = p_hat @ v[:, :, block]
        l_lse = rnd("l", alpha * l_lse + t_bar, keys + j)
        l = rnd("l", alpha * l + t, j)  # noqa: E741
        kept, added = rnd("o_acc", alpha * o_acc, at), rnd("o_acc", pv, at + d)
        o_acc = rnd("o_acc", kept + added, at + 2 * d)
        l_star, o_star = alpha * l_star + t, alpha * o_star + pv
        blocks.append((s, x, p_bar, p_hat, alpha))
    s, x, p_bar, p_hat, alpha = (torch.cat(parts, -1) for parts in zip(*blocks, strict=True))
    ties = ((s == s.amax(-1, keepdim=True)) & visible).sum(-1)
    return SimpleNamespace(
        s=s, x=x, p_unnorm=p_bar, p=p_hat, alpha=alpha, m=m[..., 0], l=l[..., 0], ties=ties,
        o_acc=o_acc, o=rnd("o", o_acc / l, rnd.place), o_fp32=o_star / l_star,
        lse=(m + (l_lse if p.l_from == "p_both" else l).log())[..., 0],
    )  # fmt: skip


def delta(t, p, do, rnd):
    """delta as `delta_from` and `delta_bias` say; p: P, not rounded."""
    policy, o = rnd.policy, t.o_fp32
    if policy.delta_from == "dp":
        of = (p * t.dp).sum(-1)
    else:
        drawn = rnd.words(13, o.shape, rnd.query, rnd.place)
        read = {
            "o": t.o,
            "o_fp32": o,
            "o_split": t.o + (o - t.o).bfloat16().float(),
            "o_redrawn": round_to(o, policy.o.fmt, "stochastic", bits=drawn),
        }[policy.delta_from]
        of = rnd("dodo", do * read, rnd.place).sum(-1)
    return of + policy.delta_bias * (t.delta_o - t.delta_ref).abs()


def backward(t, q, k, v, do, rnd, tile, c):
    key, place, d = rnd.key, rnd.place, k.shape[3]
    p = (t.s - t.lse[..., None]).exp()
    t.p_bwd, t.dp = rnd("p_bwd", p, key), rnd("dp", do @ v.mT, key)
    t.delta_o = rnd("dodo", do * t.o, place).sum(-1)
    t.delta_ref = (do * t.o_fp32).sum(-1)
    t.delta = delta(t, p, do, rnd)
    t.ds = rnd("ds", p * (t.dp - t.delta[..., None]), key)
    t.row_sum = t.ds.sum(-1)

    def summed(site, products, per_block, first, row=None):
        total = torch.zeros(d)
        for i, product in enumerate(products):
            at = d * (per_block * i + first) + place
            total = rnd(site, total + rnd(site, product, at, row), at + d, row)
        return total

    a = summed("dq_acc", (t.ds[..., b] @ k[:, :, b] for b in key.split(tile)), 2, 0)
    t.ds_dk = t.ds
    if rnd.policy.row_sum == "removed":
        a = a - t.row_sum[..., None] * (k / k.shape[2]).sum(2, keepdim=True)
    elif rnd.policy.row_sum == "refined":
        a = a - t.row_sum[..., None] * (t.p_bwd @ k)
        t.ds_dk = rnd("ds", p * (t.dp - (t.delta + t.row_sum)[..., None]), key)
    rows, of_keys = rnd.query[:, 0].split(tile), key[:, None]
    dk, dv = (
        summed("dkdv_acc", (x[:, :, b].mT @ y[:, :, b] for b in rows), 4, first, of_keys)
        for x, y, first in ((t.ds_dk, q, 0), (t.p_bwd, do, 2))
    )
    t.dq, t.dk, t.dv = c * a, c * dk, dv


LN2 = math.log(2)
EACH = PrecisionPolicy(**{site: f"e8m{4 + i}" for i, site in enumerate(SITES)})
DRAWN = EACH.replace(**{site: f"e8m{4 + i}:stochastic" for i, site in enumerate(SITES)})
CHANGES = [
    {}, dict(l_from="p_rounded", delta_from="o_fp32", row_sum="removed"),
    dict(row_sum="refined"), dict(delta_from="o_split", delta_bias=-0.5, l_floor=3.0),
    dict(l_from="p_both", delta_from="o_fp32"), dict(l_from="p_both", l_floor=3.0),
    dict(delta_from="o_redrawn"),
    dict(delta_from="dp", delta_bias=2.0), dict(shift="beta(beta=2,gamma=0.5,tol=0.3)"),
    dict(shift="offset(amplitude=0.3)"), dict(shift="dither(amplitude=0.7)"),
    dict(shift="mute(amplitude=1,tol=0.3)", l_floor=0.1), dict(shift="pow2", x="fp32"),
]  # fmt: skip


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tile", [10, 24])
@pytest.mark.parametrize("base", [EACH, DRAWN], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("fields", CHANGES, ids=str)
def test_emulate_computes_what_the_notation_says(fields, base, tile, causal):
    q, k, v, do = family("normal", (2, 2, 24, 16), dtype=torch.float32)
    policy = base.replace(**fields)
    got = emulate(q, k, v, policy, tile, do, causal, 0.3, seed=7)
    rnd = Rounding(q, k.shape[2], policy, seed=7)
    wanted = forward(q, k, v, rnd, tile, causal, 0.3)
    backward(wanted, q, k, v, do, rnd, tile, 0.3)
    assert vars(got).keys() == vars(wanted).keys()
    assert [x for x, y in vars(wanted).items() if not torch.equal(getattr(got, x), y)] == []
