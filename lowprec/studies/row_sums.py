"""Row sums of dS out of dQ: which vector takes them off, and what is left of the errors.

A row of dS sums to zero in exact arithmetic, so dq_i = scale * sum_j dS_ij (k_j - c) for any vector
c that all keys of the row have in common. Rounding leaves a row sum r_i, and the kernel adds
scale * r_i * c of error for the part c that keys share. `POLICIES` are those of the field `row_sum`
of `lowprec.numerics.policy`: nothing taken off, the mean key, the row's own weighted key with delta
refined for dK. `seen_mean` is one more candidate for c, and `second_pass` has dQ from the refined
delta as well. `left` measures each on a captured head, `ranges` on made inputs, and `proposed` on a
captured head what others propose:

    python -m lowprec.studies.row_sums data/studies/row_sums   DATE-left, -proposed, -ranges.parquet

`outside` has what can be done around a kernel of somebody else; it takes half a second a head.

The rule of the prediction, written down before the table was made: on captured failing heads of
`FA2`, dQ as it is stored has less error with the mean key taken off than with `CLEAN`, by a factor
of TIMES or more in the median over heads (`against_safe`).
"""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pandas as pd
import torch

from lowprec import entry
from lowprec.attention import attention
from lowprec.attention.outside import centred as centred_keys
from lowprec.attention.outside import row_sums_out
from lowprec.attention.reference import emulate, oracle
from lowprec.numerics.policy import FA2, LOW, PrecisionPolicy
from lowprec.records.files import data_root
from lowprec.studies import dated
from lowprec.studies.rivals import centred, query_gradient
from lowprec.training.capture import Capture

PARAMETERS = dict(draws=4)
"""Those of the page: made inputs of each kind."""
TIMES = 10
DELTAS = {"o": "FA2", "o_fp32": "CLEAN"}
"""What delta reads, and what `FA2` with it is called."""


POLICIES = {"none": "as_rounded", "mean key": "removed", "refined": "refined"}
"""Values of the field `row_sum`."""
CHANGES = (*POLICIES, "mean of seen keys", "second pass", "second pass, mean key", "centred keys")

PROPOSED = {
    "two row sums": "l_from=p_both",
    "two row sums, clean δ": "l_from=p_both+delta_from=o_fp32",
    "O′ in FP32": "delta_from=dp",
    "O′ in BF16": "p=fp32",
}
"""What others propose, as changes of a policy. Two row sums: flash-attention, pull request 2721.
O′: δ from a second output, of unrounded weights (Attn-QAT, arXiv:2603.00040), which in FP32 gives
the δ of P∘dP. Stored in BF16, as in their code, it gives the gradients of unrounded P."""


def seen_mean(k):
    """The mean of the keys that each row of a causal head sees.  (B, H, T, D)"""
    return k.cumsum(2) / torch.arange(1, k.shape[2] + 1)[:, None]


def second_pass(t, k, scale):
    """The trace of `row_sum=refined` with dQ from the refined delta, too, for a pass over the keys.

    That dS is rounded and has row sums again. k: FP32, accumulators FP32, as in `FA2` and `LOW`."""
    t = copy.copy(t)
    t.delta, t.ds = t.delta + t.row_sum, t.ds_dk
    t.row_sum, t.dq = t.ds.sum(-1), scale * (t.ds @ k)
    return t


def changed(change: str, q, k, v, do, policy, tile=None, scale=None):
    """The trace as one of CHANGES leaves its dQ and dK; "centred keys" is of the inputs. FP32."""
    again = change.startswith("second pass")
    row_sum = "refined" if again else POLICIES.get(change, "as_rounded")
    t = emulate(q, k, v, policy.replace(row_sum=row_sum), tile, do, scale=scale)
    if again:
        t = second_pass(t, k, scale)
    taken = t.row_sum[..., None]
    if change.endswith(", mean key"):
        t.dq = t.dq - scale * taken * k.mean(2, keepdim=True)
    elif change == "mean of seen keys":
        t.dq = t.dq - scale * taken * seen_mean(k)
    return t


def head(q, k, v, do, scale=None, x=None, tile=None, rotation=None) -> SimpleNamespace:
    """A causal head to measure: q, k, v, do (1, 1, T, D), x (1, T, C) for the gradient of W_Q."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tensors = dict(q=q, k=k, v=v, do=do) | ({} if x is None else dict(x=x))
    return SimpleNamespace(tensors=tensors, scale=scale, tile=tile, rotation=rotation)


def errors(head, policy) -> pd.DataFrame:
    """What each delta of DELTAS with each of CHANGES leaves of a head's errors, a row each.

    head: a `Capture` or `head`. All errors are against float64 attention on the inputs that it got,
    as a share of the norm of what is right: dq and dk as stored in the dtype of q; dq_fp32 before
    it is stored; along, that of dq along the mean key; w_q, of the gradient of W_Q; dk_centred,
    dk less its mean over the keys, which is zero in exact arithmetic. row_sum: root mean square of
    the row sums of dS as rounded. moved: how far the change moves the exact dq, by its inputs.
    """
    rows = []
    whole = _exact(head)
    for change in CHANGES:
        some = _centred(head) if change == "centred keys" else head
        right = _exact(some)
        q, k, v, do = (some.tensors[n].float() for n in ("q", "k", "v", "do"))
        for source in DELTAS:
            now = policy.replace(delta_from=source)
            t = changed(change, q, k, v, do, now, some.tile, some.scale)
            found = _errors(some, t, right)
            rows.append(dict(delta=source, change=change) | found | dict(
                row_sum=t.row_sum.double().square().mean().sqrt().item(),
                moved=_share(right.dq, whole.dq),
            ))  # fmt: skip
    return pd.DataFrame(rows)


def _exact(head):
    q, k, v, do = (head.tensors[name] for name in ("q", "k", "v", "do"))
    return oracle(q, k, v, scale=head.scale, do=do)


def _centred(given):
    if isinstance(given, Capture):
        return centred(given)
    k = centred_keys(given.tensors["k"])
    how = dict(scale=given.scale, tile=given.tile, rotation=given.rotation)
    return head(**given.tensors | dict(k=k), **how)


def _errors(head, t, right) -> dict[str, float]:
    dtype, k = head.tensors["q"].dtype, head.tensors["k"].double()
    dq, dk = (x.to(dtype).double() for x in (t.dq, t.dk))
    common = torch.nn.functional.normalize(k.mean(2, keepdim=True), dim=-1)
    found = dict(dq=_share(dq, right.dq), dq_fp32=_share(t.dq, right.dq))
    found["along"] = (((dq - right.dq) * common).sum(-1).norm() / right.dq.norm()).item()
    if "x" in head.tensors:
        found["w_q"] = _share(query_gradient(head, dq), query_gradient(head, right.dq))
    found["dk"] = _share(dk, right.dk)
    found["dk_centred"] = _share(dk - dk.mean(2, keepdim=True), right.dk)
    return found


def _share(x, right) -> float:
    return ((x.double() - right).norm() / right.norm()).item()


def load_captures() -> dict[str, Capture]:
    """All captures by name, those of the larger model as gpt2/NAME."""
    folder = data_root() / "captures"
    paths = sorted(folder.glob("**/*.xz"))
    return {p.relative_to(folder).with_suffix("").as_posix(): Capture.load(p) for p in paths}


def base_of(name: str):
    """(name, policy) of the run that failed, for a capture of it or of its twin."""
    low = name.rpartition("/")[2].startswith("low")
    return ("LOW", LOW) if low else ("FA2", FA2)


def left(name: str, capture) -> pd.DataFrame:
    """`errors` of a capture under the policy of the run that failed, a row a candidate.

    Columns before: capture, failing, base (FA2 or LOW), layer, head, share (norm of the mean key
    over the root mean square of the keys)."""
    _, policy = base_of(name)
    k = capture.tensors["k"].double()
    share = (k.mean(2).norm() / k.square().sum(-1).mean().sqrt()).item()
    about, found = _about(name, capture) | dict(share=share), errors(capture, policy)
    return pd.concat([pd.DataFrame([about] * len(found)), found], axis=1)


def _about(name: str, capture) -> dict:
    return dict(
        capture=name, failing="healthy" not in name, base=base_of(name)[0], layer=capture.layer,
        head=capture.heads[0],
    )  # fmt: skip


def proposed(name: str, capture) -> pd.DataFrame:
    """What each of PROPOSED leaves of a captured head's errors, a row each; dO is as captured.

    Columns: those of `left` up to head; change, a key of PROPOSED; dq to dk_centred as in `errors`.
    """
    rows, right = [], _exact(capture)
    q, k, v, do = (capture.tensors[n].float() for n in ("q", "k", "v", "do"))
    for change, fields in PROPOSED.items():
        policy = PrecisionPolicy.parse(f"{base_of(name)[1]}+{fields}")
        t = emulate(q, k, v, policy, capture.tile, do, scale=capture.scale)
        rows.append(_about(name, capture) | dict(change=change) | _errors(capture, t, right))
    return pd.DataFrame(rows)


TAKEN_OFF = {
    "stored δ (FA2)": ("o", "none"),
    "clean δ": ("o_fp32", "none"),
    "row sums out of dQ": ("o", "mean key"),
    "both": ("o_fp32", "mean key"),
    "refined δ": ("o", "refined"),
}
"""Delta and change of `left` by what the book calls them."""


def specimen(path) -> dict[str, float]:
    """Of a capture, the share of its mean key and the error of dQ with each of TAKEN_OFF, then with
    delta from dP∘P."""
    found = left("FA2", capture := Capture.load(path)).set_index(["delta", "change"])
    fp32 = proposed("FA2", capture).set_index("change").dq["O′ in FP32"]
    shares = dict(share=found.share.iloc[0])
    return shares | {way: found.dq[key] for way, key in TAKEN_OFF.items()} | {"δ from dP∘P": fp32}


def specimens() -> pd.DataFrame:
    """`specimen` of each capture of the campaign positions_specimens, index (run, step).

    Captures that were kept are measured again; the others are in its `captured.parquet`.
    """
    folder = data_root() / "runs" / "positions_specimens"
    table = pd.read_parquet(folder / "captured.parquet").set_index(["run", "step"])
    for path in sorted(folder.glob("*/captures/*.xz")):
        run = path.parts[-3].rpartition("-")[0]
        table.loc[(run, int(path.stem.removeprefix("step-"))), :] = specimen(path)
    return table.sort_index()


def against_safe(table, change="mean key", of="dq", bases=("FA2",)) -> pd.Series:
    """The error with clean delta over that with a change of CHANGES, of each failing head.

    table: of `left`. of: the column of the error. bases: runs with which policies.
    """
    some = table[table.failing & table.base.isin(bases)]
    by = some.pivot(index="capture", columns=["delta", "change"], values=of)
    return by["o_fp32", "none"] / by["o", change]


def _around(vector: str):
    """A way of WAYS: the channel of ones, and a vector."""

    def way(kernel, q, k, v, scale):
        return row_sums_out(kernel, q, k, v, scale, vector=vector)

    return way


def _centred_first(way):
    return lambda kernel, q, k, v, scale: way(kernel, q, centred_keys(k), v, scale)


def _as_it_is(kernel, q, k, v, scale):
    return kernel(q, k, v, scale)


WAYS = {
    "as it is": _as_it_is,
    "centred keys": _centred_first(_as_it_is),
    "mean key": _around("mean key"),
    "weighted key": _around("weighted key"),
    "centred keys, weighted key": _centred_first(_around("weighted key")),
}
"""What can be done around a kernel: `lowprec.attention.outside`."""
KERNELS = {"FA2": "emulate", "PyTorch on a CPU": "sdpa"}
"""Kernels to do it around, as `impl` of `lowprec.attention.attention`; both have BF16 tensors."""


def outside(capture) -> pd.DataFrame:
    """What each of WAYS around each of KERNELS leaves of a captured head's errors, a row each.

    Columns kernel, way, dq, dk: errors as in `errors`, but against float64 attention on the keys as
    captured, so that the rounding of centred keys counts."""
    right, rows = _exact(capture), []
    for name, impl in KERNELS.items():

        def kernel(q, k, v, scale, impl=impl):
            return attention(q, k, v, FA2, scale=scale, impl=impl)

        for way, call in WAYS.items():
            leaves = [capture.tensors[n].detach().requires_grad_() for n in ("q", "k", "v")]
            o = call(kernel, *leaves, capture.scale)
            dq, dk, _ = torch.autograd.grad(o, leaves, capture.tensors["do"])
            rows.append((name, way, _share(dq, right.dq), _share(dk, right.dk)))
    return pd.DataFrame(rows, columns=["kernel", "way", "dq", "dk"])


def made(kind: str, size: float, generator) -> SimpleNamespace:
    """A random head in BF16, D = 64: Gaussian q, k, v, dO, and one thing beside it.

    "common part": all keys have a vector of `size` times their root mean square in common, T = 256.
    "negative scores": that vector is as long as the keys, and every q has a part against it that
    moves all scores by about -size, T = 256. "long rows": the common part is 1, T = size.
    """
    tokens, d = int(size) if kind == "long rows" else 256, 64
    q, k, v, do = torch.randn(4, 1, 1, tokens, d, generator=generator)
    shared = torch.randn(d, generator=generator)
    shared *= math.sqrt(d) / shared.norm()
    k = k + (size if kind == "common part" else 1.0) * shared
    if kind == "negative scores":
        q = q - size / math.sqrt(d) * shared  # times k, over the root of d: -size
    return head(*(x.bfloat16() for x in (q, k, v, do)))


RANGES = {
    "common part": (0.0, 1.0, 10.0, 100.0),
    "negative scores": (10.0, 100.0, 1000.0),
    "long rows": (64.0, 1024.0, 4096.0),
}
"""Kinds of `made` and their sizes."""


def ranges(draws: int) -> pd.DataFrame:
    """`errors` under FA2 of made heads; columns before: kind, size, draw (one of long rows)."""
    tables = []
    for kind, sizes in RANGES.items():
        for size in sizes:
            for draw in range(1 if kind == "long rows" else draws):
                some = made(kind, size, torch.Generator().manual_seed(draw))
                found = errors(some, FA2)
                tables.append(found.assign(kind=kind, size=size, draw=draw))
    table = pd.concat(tables, ignore_index=True)
    first = ["kind", "size", "draw"]
    return table[first + [name for name in table if name not in first]]


def measure(draws: int) -> dict[str, pd.DataFrame]:
    """The tables `left` and `proposed` of all captures, and `ranges`."""
    captures = load_captures()
    tables = {
        of.__name__: pd.concat([of(*item) for item in captures.items()], ignore_index=True)
        for of in (left, proposed)
    }
    return tables | dict(ranges=ranges(draws))


def main(argv: list[str] | None = None) -> None:
    """Measure what the vector that takes row sums out of dQ leaves of the errors of dQ and dK."""
    dated.command("row_sums", main.__doc__, measure, argv, **PARAMETERS)


if __name__ == "__main__":
    entry(main)
