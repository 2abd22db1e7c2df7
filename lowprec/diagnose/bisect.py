"""Find the guilty rounding: the smallest sets of fields that must go for an error to go.

A captured head is replayed under its policy with some fields in FP32. A set of fields is *enough*
if it leaves `WITHIN` or less of the error under the policy as it is, and *minimal* if it is enough
and no part of it is. `minimal_sets` tries sets by size, so it finds all minimal sets of up to
so many fields, however they act together: two errors that cancel are no exception. By default that
are all sizes of which `SETS` sets can be tried. If there are none, `ddmin` looks for a larger one
(Zeller & Hildebrandt 2002, doi:10.1109/32.988498), as Verrou does for the instructions of a program
(Fevotte & Lathuiliere 2019).

The errors of independent roundings add by squares. So a quarter of the error means that the fields
named made all but 1/16 of its square, where half would let one of two equal ones go free.

A field in FP32 draws the roundings behind it anew. Where an error is a sum over rows, in W_Q's
gradient and in the sum of dS, that alone can make it small, by luck: `Guilty.redrawn` says how
small. dQ is measured row by row and hardly moves.

`lowprec.diagnose.bisect_runs` asks whole trainings instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise

import torch

from lowprec import UserError
from lowprec.attention import trace
from lowprec.attention.reference import oracle
from lowprec.numerics.policy import ALL_FP32, CHOICES, SITES, PrecisionPolicy
from lowprec.training.capture import Capture, query_gradient

WITHIN = 0.25
SETS = 300
"""Sets that a search may try before it takes `ddmin`: all of 8 fields, those of up to 4 of 9 and of
up to 3 of 12."""
DRAWS = 8
MODES = (
    "delta_from=o_fp32", "delta_from=o_split", "delta_from=dp", "l_from=p_rounded",
    "row_sum=removed", "row_sum=refined",
)  # fmt: skip
"""Changes that are no roundings, which a search may take beside fields in FP32."""
UNREAD = ("p_bwd", "dkdv_acc")
"""Fields that dQ and dS do not read; a refined delta reads the first."""
ERRORS = {
    "dq": "the error of dQ",
    "wq": "the error of W_Q's gradient",
    "row_sum": "the sum of dS, which should be 0",
}


def minimal_sets(items: Sequence, enough: Callable[[tuple], bool], size: int) -> list[tuple]:
    """All sets of up to `size` items that are enough and have no part that is, the small first.

    enough: any function of a tuple of items in their order; it is not asked about the empty set,
    nor about one that holds a set found, so at most 2^n - 1 times.
    """
    found: list[tuple] = []
    for count in range(1, min(size, len(items)) + 1):
        for some in combinations(items, count):
            if not any(set(one) <= set(some) for one in found) and enough(some):
                found.append(some)
    return found


def ddmin(items: Sequence, enough: Callable[[tuple], bool]) -> tuple:
    """Some of `items` that are enough, but no more if any single one of them is left out.

    items: enough together. Delta debugging: halves, then what is left of each, then finer parts;
    about n log n tests where few items matter, n^2 at most.
    """
    items, parts = tuple(items), 2
    while len(items) > 1:
        ends = [len(items) * i // parts for i in range(parts + 1)]
        chunks = [items[a:b] for a, b in pairwise(ends)]
        rests = [items[:a] + items[b:] for a, b in pairwise(ends)]
        if chunk := next(filter(enough, chunks), None):
            items, parts = chunk, 2
        elif rest := next(filter(enough, rests), None):
            items, parts = rest, max(parts - 1, 2)
        elif parts == len(items):
            break
        else:
            parts = min(2 * parts, len(items))
    return items


def affordable(items: int) -> int:
    """The largest size for which all sets of some items, up to that size, are at most SETS."""
    counts = accumulate(math.comb(items, size) for size in range(1, items + 1))
    return max(1, sum(count <= SETS for count in counts))


def asked(size: int | None, items: int) -> int:
    """A size as asked for, or what is affordable; raises `UserError` below 1."""
    size = affordable(items) if size is None else size
    if size < 1:
        raise UserError(f"size={size} must be at least 1 field")
    return size


def search(items: Sequence, whole: Sequence, enough: Callable, size: int) -> list[tuple]:
    """All minimal sets of up to `size` items, or else those within what `ddmin` leaves of `whole`,
    which are minimal, too, and need not be all; [] if there is none and `whole` is not enough."""
    if (found := minimal_sets(items, enough, size)) or not enough(tuple(whole)):
        return found
    part = ddmin(whole, enough)
    return minimal_sets(part, enough, len(part))


def fields_of(policy: PrecisionPolicy, all_gradients: bool = False) -> tuple[str, ...]:
    """The changes that take one rounding each out of a policy, such as "o=fp32", in the order of a
    step; a shift, a floor or a bias of delta counts as one. all_gradients: those of dK and dV, too.

    Raises `UserError` for a policy that has none.
    """
    unread = () if all_gradients else UNREAD[policy.row_sum == "refined" :]
    given = policy.diff(ALL_FP32)
    found = tuple(
        f"{name}={exact.removesuffix('.0')}"
        for name, (_, exact) in given.items()
        if name not in (*CHOICES, *unread)
    )
    if not found:
        raise UserError(f"{policy} has no rounding that dQ reads; name one with --policy")
    return found


def modes_of(policy: PrecisionPolicy) -> tuple[str, ...]:
    """Those of MODES that change a policy."""
    return tuple(mode for mode in MODES if changed(policy, [mode]) != policy)


def changed(policy: PrecisionPolicy, items: Iterable[str]) -> PrecisionPolicy:
    """A policy with some changes, such as "o=fp32"."""
    return PrecisionPolicy.parse("+".join([str(policy), *items]))


def possible(items: Iterable[str]) -> bool:
    """Whether a set changes no field twice."""
    fields = [item.partition("=")[0] for item in items]
    return len(set(fields)) == len(fields)


def shown(items: Iterable[str]) -> str:
    """A set in words: "{p, o}"; a bare name is a field in FP32."""
    return "{" + ", ".join(item.removesuffix("=fp32") for item in items) + "}"


class Replays:
    """The errors of a captured layer under any policy; each is replayed once, on the CPU.

    A replay gives {name of ERRORS: [the error of each head]}. dq, wq: the norm of the error over
    that of what is right; row_sum: |sum of dS| over the sum of |dS|. Right is float64 attention on
    the captured q, k, v and dO. dQ is as stored, in the dtype of q. All captured sequences count.
    An error that is not a number is infinite.
    """

    def __init__(self, capture: Capture):
        self.capture, self.done = capture, {}
        self.inputs = tuple(capture.tensors[name] for name in ("q", "k", "v", "do"))
        self.how = dict(tile=capture.tile, scale=capture.scale, impl="emulate")
        q, k, v, do = self.inputs
        right = oracle(q, k, v, capture.meta["causal"], capture.scale, do)
        self.right = self._measured(right)
        self.size = {of: _norms(x) for of, x in self.right.items()}
        self.size["row_sum"] = right.ds.abs().sum((0, 2, 3))

    def __call__(self, policy: PrecisionPolicy, seed: int = 0) -> dict[str, list[float]]:
        """seed: of random bits, which are not those of the run."""
        key = policy, seed if policy.draws else None
        if key not in self.done:
            t = trace(*self.inputs, policy, self.capture.meta["causal"], seed=seed, **self.how)
            self.done[key] = {
                of: (_norms(x - self.right[of]) / self.size[of]).nan_to_num(nan=math.inf).tolist()
                for of, x in self._measured(t).items()
            }
        return self.done[key]

    def _measured(self, t) -> dict[str, torch.Tensor]:
        """What each of ERRORS is of, (heads, ...) float64."""
        return dict(
            dq=t.dq.double().transpose(0, 1), wq=query_gradient(self.capture, t.dq),
            row_sum=t.row_sum.sum((0, 2), dtype=torch.float64),
        )  # fmt: skip

    def redrawn(self, policy: PrecisionPolicy, draws: int) -> list[dict[str, list[float]]]:
        """Some replays with all roundings to nearest drawn at random, up or down: as wrong, or
        somewhat more, in other ways."""
        low = [name for name in SITES if not getattr(policy, name).is_fp32]
        anew = {name: replace(getattr(policy, name), rounding="stochastic") for name in low}
        return [self(policy.replace(**anew), seed) for seed in range(draws)]


def _norms(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(len(x), -1).norm(dim=1)


@dataclass(frozen=True)
class Guilty:
    """What a search found for one head.

    head: as the capture counts. error: under the policy as it is. sets: the minimal ones; left: the
    share of the error that each set leaves that was tried, fields alone and `whole` among them.
    size: up to which all minimal sets are there. redrawn: the least share in `Replays.redrawn`,
    infinite without draws.
    """

    head: int
    policy: PrecisionPolicy
    of: str
    within: float
    error: float
    items: tuple[str, ...]
    whole: tuple[str, ...]
    sets: list[tuple[str, ...]]
    left: dict[tuple[str, ...], float]
    size: int
    redrawn: float

    @property
    def necessary(self) -> tuple[str, ...]:
        """What every minimal set found has."""
        return tuple(item for item in self.items if all(item in one for one in self.sets))

    @property
    def complete(self) -> bool:
        """Whether `sets` has all minimal sets of any size."""
        return self.size >= len(self.items)

    @property
    def minimal(self) -> list[tuple[tuple[str, ...], float]]:
        """The minimal sets with what they leave, the small first, of these the one that leaves
        least."""
        pairs = [(one, self.left[one]) for one in self.sets]
        return sorted(pairs, key=lambda pair: (len(pair[0]), pair[1]))

    def rows(self) -> list[tuple[str, float]]:
        """What is in FP32, in words, and the share of the error that it leaves."""
        rows = [(shown(one), left) for one, left in self.minimal]
        return [("nothing", 1.0), *rows, ("every field", self.left[self.whole])]

    def alone(self) -> list[tuple[str, float]]:
        """The same of each field alone: the table that cannot see what two do together."""
        return [(shown([item]), self.left[item,]) for item in self.items]


def guilty(
    replays: Replays, policy=None, of: str = "dq", within: float = WITHIN,
    size: int | None = None, modes: bool = False, draws: int | None = None,
) -> list[Guilty]:  # fmt: skip
    """Search each head of a captured layer for the minimal sets that leave `within` of its error.

    policy: of the error, by default the captured one. of: a key of ERRORS. size: of the sets that
    are all tried, by default `affordable`. modes: whether a set may have MODES as well. draws: of
    the control of luck, by default none for dq, which does not need it, and else DRAWS.
    Raises `UserError` for limits out of range, for a policy that rounds nothing that dQ reads, and
    for a head without an error.
    """
    if of not in ERRORS:
        raise UserError(f"of={of!r} is none of {', '.join(ERRORS)}")
    if not 0 < within < 1:
        raise UserError(f"within={within} must be a share of the error between 0 and 1")
    policy = PrecisionPolicy.parse(policy or replays.capture.policy)
    whole = fields_of(policy)
    items = whole + (modes_of(policy) if modes else ())
    size = asked(size, len(items))
    draws = (0 if of == "dq" else DRAWS) if draws is None else draws
    redrawn = replays.redrawn(policy, draws)
    found = []
    for place, head in enumerate(replays.capture.heads):
        error = replays(policy)[of][place]
        if not error:
            raise UserError(f"head {head} has no error under {policy}; nothing is to be found")
        luck = min((draw[of][place] for draw in redrawn), default=math.inf) / error
        left, sets = _of_head(replays, policy, of, place, within, size, items, whole)
        found.append(Guilty(head, policy, of, within, error, items, whole, sets, left, size, luck))
    return found


def _of_head(replays, policy, of, place, within, size, items, whole):
    """(the share of the error that each set leaves, the minimal sets) of the head at a place."""
    error, left = replays(policy)[of][place], {}

    def enough(some):
        if some not in left:
            now = replays(changed(policy, some))[of][place] if possible(some) else math.inf
            left[some] = now / error if math.isfinite(now) else math.inf
        return left[some] <= within

    for some in (*((item,) for item in items), whole):
        enough(some)
    return left, search(items, whole, enough, size)


def verdict(found: Guilty) -> str:
    """What a search found, in a sentence or two."""
    what, everything = ERRORS[found.of], found.left[found.whole]
    words = [f"{shown(one)} ({left:.0%} left)" for one, left in found.minimal]
    if not words:
        told = (f"Nothing brings {what} of head {found.head} down to {found.within:.0%}: "
                f"with every field in FP32 {everything:.0%} are left.")  # fmt: skip
        if everything > found.within:
            told += " That much comes from elsewhere, such as how dQ and dO are stored."
        return told
    if len(words) == 1:
        told = f"Guilty in head {found.head}: {words[0]}"
        told += ", together." if len(found.sets[0]) > 1 else ", alone."
    else:
        told = f"Guilty in head {found.head}, any one of {len(words)} sets: {', '.join(words)}."
        if found.necessary:
            told += f" All have {shown(found.necessary)[1:-1]}."
    if found.redrawn <= found.within:
        told += (f" Doubt it: with all roundings drawn at random {found.redrawn:.0%} are left in "
                 "the best replay, so luck does as well; --of dq is steadier.")  # fmt: skip
    return told


def report(found: Guilty) -> str:
    """A table of what each set leaves of a head's error, and the verdict below it."""
    rows = [*found.rows(), ("", None), *found.alone()]
    width = max(len(words) for words, _ in rows)
    size = f"{found.error:.2%} of {'all |dS|' if found.of == 'row_sum' else 'its norm'}"
    lines = [f"head {found.head}: {size}", f"{'in FP32':{width}}  left of the error"]
    for words, left in rows:
        lines.append(f"{words:{width}}  {left:7.1%}" if words else "each alone:")
    return "\n".join([*lines, "", verdict(found)])


def reach(found: Guilty) -> str:
    """How far a search went, in a sentence."""
    n, kind = len(found.items), "fields" if found.items == found.whole else "fields and changes"
    if found.complete:
        return f"All sets of its {n} {kind} were tried."
    told = f"All sets of up to {found.size} of its {n} {kind} were tried"
    if any(len(one) > found.size for one in found.sets):
        return f"{told} and none is enough; of larger ones there may be more."
    return f"{told}; --size {n} tries all."
