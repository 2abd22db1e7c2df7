"""Captures: specimens of one attention layer, saved from a run and replayed anywhere.

`observe` runs one batch through the model and keeps what a layer's attention reads and gets back;
`suspect` names the head and sequence whose W_Q gradient is most wrong; `save` writes them with
everything that is needed to compute them again. `Capture.load(path).replay()` does that, and says
whether the output is reproduced; `replay(policy=...)` is the counterfactual: same inputs, other
roundings.

A file is safetensors in xz, with the header key `format` = "lowprec-capture-1". The other keys hold
JSON; `sha256` is over them and the tensors (`digest`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes

from lowprec import UserError
from lowprec.attention import trace
from lowprec.attention.operator import that_runs
from lowprec.numerics import agreement
from lowprec.numerics.policy import FIELDS, PrecisionPolicy
from lowprec.records import files, provenance
from lowprec.training.model import GPT, GPTConfig, autocast, take_heads
from lowprec.training.probes import dq_error, query_error
from lowprec.training.rotary import rotate

FORMAT = "lowprec-capture-1"
MAX_BYTES = 3_000_000
"""Before compression."""
XZ = [dict(id=lzma.FILTER_LZMA2, preset=6, lc=3, lp=1, pb=1)]
"""xz that knows of 16-bit numbers: lp=1 has statistics for the first byte and for the second."""
META = (
    "policy", "tile", "scale", "causal", "seed", "impl", "step", "layer", "heads", "sequences",
    "call_heads", "model", "hardware", "versions", "commit",
)  # fmt: skip
"""Keys that every capture has; call_heads are the heads' places in the call of attention, which
differ from `heads` where heads of a layer have several policies."""


def observe(
    model, tokens, targets, seed=0, amp=True, layers=None, loss_scale: float = 1.0
) -> dict[int, SimpleNamespace]:
    """What the attention of each layer reads and gets back on a batch: {layer: namespace}.

    model: a GPT, or DistributedDataParallel or torch.compile around one. tokens, targets: (B, T)
    int64, as many sequences as fit into memory beside the model. amp: as `TrainConfig.amp`, but
    not None. layers: None for all.

    An extra forward and backward, eager even where `model.loss` is compiled. Weights, their
    gradients and the optimiser are not touched. A compiled step may differ in the last bits of
    what enters attention, since Inductor orders FP32 sums its own way.

    A namespace holds x (B, T, C), the normalised input as the matmul with W_QKV reads it; q, o, do
    (B, H, T, D) and k, v, of fewer heads if shared, q and k turned by rotary positions; tokens,
    targets, loss, the layer's rotation, and how it calls attention: groups, tile, impl, seed. `do`
    is the gradient of `loss_scale` times this batch's mean loss; in FP16 the gradients underflow
    without a scale.
    """
    model, seen = _unwrapped(model), {}
    with contextlib.ExitStack() as stack:
        for layer in range(len(model.blocks)) if layers is None else layers:
            seen[layer] = stack.enter_context(_watched(model.blocks[layer]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(autocast(tokens.device, amp))
        loss = GPT.loss(model, model.token(tokens), targets, None, seed)
        scaled = loss_scale * loss
    gradients = torch.autograd.grad(scaled, [s.o for s in seen.values()])
    for s, do in zip(seen.values(), gradients, strict=True):
        s.do = do
        for name in ("x", "q", "k", "v", "o"):
            setattr(s, name, getattr(s, name).detach())
        s.x = s.x.to(s.v.dtype)
        s.tokens, s.targets, s.loss = tokens, targets, loss.detach()
    return seen


def _unwrapped(model):
    for wrapper in ("module", "_orig_mod"):
        model = getattr(model, wrapper, model)
    return model


@contextlib.contextmanager
def _watched(block):
    """Shadow two methods of this block, so that what passes through them is kept."""
    c, seen = block.config, SimpleNamespace()
    seen.groups, seen.tile, seen.impl = block.groups, c.tile, c.impl
    seen.rotation = block.rotation
    heads, attention = block.heads, block.attention

    def watched_heads(x):
        seen.x = x
        return heads(x)

    def watched_attention(q, k, v, probe=None, seed=0):
        o = attention(q, k, v, probe, seed)
        vars(seen).update(q=q, k=k, v=v, o=o, seed=seed)
        return o

    block.heads, block.attention = watched_heads, watched_attention
    try:
        yield seen
    finally:
        del block.heads, block.attention


def query_bias(seen) -> torch.Tensor:
    """eps = delta_o - delta_ref of one observed layer, (B, H, T) float32; see `training.probes`."""
    eps = torch.empty(seen.q.shape[:3], device=seen.q.device)
    for policy, heads in seen.groups:
        given = (seen.q, seen.k, seen.v, seen.do)
        q, k, v, do = (take_heads(x, heads, eps.shape[1]) for x in given)
        t = trace(q, k, v, do, policy, tile=seen.tile, impl=_shown(seen.impl), seed=seen.seed)
        for i, head in enumerate(heads):
            eps[:, head] = t.delta_o[:, i] - t.delta_ref[:, i]
    return eps


def _shown(impl: str) -> str:
    """PyTorch's own kernel shows no intermediates; ours under the same policy stands in."""
    return "auto" if impl.startswith("sdpa") else impl


def suspect(observed: dict[int, SimpleNamespace]) -> tuple[int, int, int]:
    """(layer, head, sequence) with the largest error of a W_Q gradient.

    The layer and head by ||e|| over the batch, then the sequence that has the largest share of its
    own. A norm that is not a number counts as the largest.
    """
    layers, bias = list(observed), [query_bias(s) for s in observed.values()]
    norms = torch.stack(
        [
            query_error(s.q, s.k, s.x, eps, s.rotation, impl=_shown(s.impl)).flatten(1).norm(dim=1)
            for s, eps in zip(observed.values(), bias, strict=True)
        ]
    )
    index, head = divmod(int(norms.argmax()), norms.shape[1])
    s, eps = observed[layers[index]], bias[index]
    q, k = (take_heads(x, [head], eps.shape[1]) for x in (s.q, s.k))
    rows = dq_error(q, k, eps[:, head : head + 1], impl=_shown(s.impl))[:, 0]
    rows = rotate(rows, s.rotation, back=True)
    sequence = int((rows.mT @ s.x.float()).flatten(1).norm(dim=1).argmax())
    return layers[index], head, sequence


def save(path, observed, model, layer, heads, sequences, info) -> Path:
    """Write one capture of `layer`, atomically; an existing file is refused.

    observed: from `observe`, before the weights of `model` change. heads, sequences: which of
    them, at most `MAX_BYTES` together; the heads must share a policy. info: what else to record,
    JSON only; "step" is required, and run, data_sha256 and the trainer's config belong in it.

    Tensors: x (S, T, C); tokens, targets (S, T) int32; w_q, w_k, w_v (H', D, C) in the dtype of
    the matmul; q, k, v, o, do (S, H', T, D), o as the caller of attention got it. Keys and values
    are those that a head of queries reads, one for each also where they are shared.
    """
    path, seen, heads, sequences = Path(path), observed[layer], list(heads), list(sequences)
    model = _unwrapped(model)
    if path.exists():
        raise UserError(f"capture {path} exists and is never overwritten; choose another name")
    c, device = model.config, seen.q.device
    if seen.impl.startswith("sdpa"):
        raise UserError(f"impl={seen.impl!r} cannot be replayed; capture a run with impl='triton'")
    groups = [(policy, group) for policy, group in seen.groups if set(heads) <= set(group)]
    if not heads or not sequences or not groups:
        raise UserError(f"heads {heads} of layer {layer}: name some that share one policy")
    policy, group = groups[0]
    policy = PrecisionPolicy.parse(policy)
    tensors = {
        name: take_heads(getattr(seen, name)[sequences], heads, c.n_head)
        for name in ("q", "k", "v", "o", "do")
    }
    tensors |= dict(x=seen.x[sequences])
    tensors |= {name: getattr(seen, name)[sequences].int() for name in ("tokens", "targets")}
    for name, weight in zip("qkv", c.by_head(model.blocks[layer].qkv.weight.detach()), strict=True):
        own = [head * len(weight) // c.n_head for head in heads]  # of shared keys
        tensors[f"w_{name}"] = weight[own].to(seen.x.dtype)
    tensors = {name: t.cpu().contiguous() for name, t in tensors.items()}
    meta = provenance.provenance(str(device)) | dict(info) | dict(
        policy={name: str(getattr(policy, name)) for name in FIELDS}, tile=seen.tile,
        scale=c.head_dim**-0.5, causal=True, seed=seen.seed, layer=layer, heads=heads,
        impl=that_runs(policy, seen.tile, seen.impl, device, c.head_dim),
        sequences=sequences, call_heads=[group.index(head) for head in heads],
        model=dataclasses.asdict(c),
    )  # fmt: skip
    if missing := [name for name in META if name not in meta]:
        raise UserError(f"capture {path.name} lacks {', '.join(missing)}; put it into info")
    header = {name: json.dumps(value, sort_keys=True) for name, value in meta.items()}
    header |= dict(format=FORMAT, sha256=digest(tensors, header))
    _write(path, to_bytes(tensors, header))
    return path


def tensor_bytes(config, heads: int, amp) -> int:
    """What the tensors of a capture take, of some heads and one sequence of a GPT's whole block."""
    number = 2 if amp else 4
    length, width, head_dim = config.block_size, config.n_embd, config.n_embd // config.n_head
    of_head = number * head_dim * (3 * width + 5 * length)
    return length * (number * width + 2 * 4) + heads * of_head


def digest(tensors, header) -> str:
    """sha256 over the header (without `format` and `sha256`) and the tensors, in name order."""
    result = hashlib.sha256()
    for name in sorted(set(header) - {"format", "sha256"}):
        result.update(f"{name}={header[name]}\n".encode())
    for name, t in sorted(tensors.items()):
        result.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
        result.update(t.contiguous().view(torch.uint8).numpy())
    return result.hexdigest()


def check_size(count: int):
    """Raise `UserError` for a capture of so many bytes."""
    if count > MAX_BYTES:
        raise UserError(
            f"a capture would take {count / 1e6:.1f} MB, more than {MAX_BYTES / 1e6:.0f}; take "
            "fewer sequences, then fewer heads"
        )


def _write(path: Path, content: bytes):
    check_size(len(content))
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = lzma.compress(content, filters=XZ)
    files.write_atomic(path, lambda file: file.write(packed))


@dataclass(frozen=True)
class Capture:
    """A specimen: `tensors` as `save` wrote them (on the CPU), and `meta`, the header."""

    path: Path
    tensors: dict[str, torch.Tensor]
    meta: dict

    def __repr__(self) -> str:
        where = f"step {self.step}, layer {self.layer}, heads {self.heads}"
        return f"Capture({self.path.stem}: {where}, sequences {self.sequences}, {self.policy})"

    @classmethod
    def load(cls, path) -> Capture:
        """Read and check a file, in xz or not; `UserError` where it is missing, damaged or foreign.

        path: from the working directory, else from the root of the clone.
        """
        path = files.at_root(path)
        if not path.is_file():
            folder = next(
                (f for f in (path, path / "captures") if any(f.glob("*.xz"))), path.parent
            )
            names = sorted(p.stem if path.suffix else p.name for p in folder.glob("*.xz"))
            inside = "that folder" if folder == path.parent else f"{folder.name}/"
            has = f"; {inside} has {', '.join(names)}" if names else ""
            raise UserError(f"there is no capture {path}{has}")
        try:
            content = path.read_bytes()
            if content.startswith(b"\xfd7zXZ"):
                content = lzma.decompress(content)
            tensors = from_bytes(content)
            end = 8 + int.from_bytes(content[:8], "little")
            header = json.loads(content[8:end]).get("__metadata__") or {}
        except (lzma.LZMAError, SafetensorError, OSError, ValueError) as error:
            raise UserError(
                f"{path} is damaged or no capture ({error}): restore it, if a training of this "
                "package wrote it"
            ) from None
        if header.get("format") != FORMAT:
            other = "of a model give the folder that save_pretrained of transformers makes"
            if {"q", "k", "v"} <= tensors.keys():
                other = "of q, k and v alone `python -m lowprec compare --on` can read it"
            raise UserError(
                f"{path} is not a capture of the format {FORMAT}, which a training of this package "
                f"records; {other}"
            )
        if header.get("sha256") != digest(tensors, header):
            raise UserError(f"{path} differs from its sha256; restore it from git or record again")
        meta = {n: json.loads(v) for n, v in header.items() if n not in ("format", "sha256")}
        if missing := [name for name in META if name not in meta]:
            raise UserError(f"{path} lacks {', '.join(missing)}; record the capture again")
        return cls(path, tensors, meta)

    @property
    def policy(self) -> PrecisionPolicy:
        return PrecisionPolicy(**self.meta["policy"])

    @property
    def tile(self) -> int | None:
        return self.meta["tile"]

    @property
    def scale(self) -> float:
        return self.meta["scale"]

    @property
    def step(self) -> int:
        return self.meta["step"]

    @property
    def layer(self) -> int:
        return self.meta["layer"]

    @property
    def rotation(self) -> torch.Tensor | None:
        """The table of `training.rotary` by which q and k were turned; None where they were not."""
        return GPTConfig(**self.meta["model"]).rotation(self.layer)

    @property
    def heads(self) -> list[int]:
        return self.meta["heads"]

    @property
    def sequences(self) -> list[int]:
        return self.meta["sequences"]

    @property
    def heading(self) -> tuple[str, str, str]:
        """Preset, seed and step of its run, as a column of a table says them."""
        preset = str(self.policy).partition("+")[0]
        return preset, f"seed {self.meta['config']['seed']}", f"{self.step:,}"

    def first(self, count: int) -> Capture:
        """The capture cut to its first tokens, which attention allows, being causal."""
        if not self.meta["causal"]:
            raise UserError(f"{self.path.stem} is not causal, so it cannot be cut")
        cut = {name: self.tensors[name][:, :count] for name in ("x", "tokens", "targets")}
        cut |= {name: self.tensors[name][:, :, :count] for name in ("q", "k", "v", "o", "do")}
        return dataclasses.replace(self, tensors=self.tensors | cut)

    def replay(self, policy=None, impl="auto", device=None) -> SimpleNamespace:
        """Compute the captured attention and its backward again, on the GPU if there is one.

        Returns the trace of `lowprec.attention.trace`, on the CPU, with

        reproduced: whether o is the captured one. With the Triton kernels, on the captured GPU and
            versions: bitwise. Elsewhere `lowprec.numerics.agreement.agrees` decides. None where
            `policy` is not the captured one (the counterfactual), and for impl="oracle". A field
            that o does not depend on, such as delta_from, is not tested by it.
        differs: share of the elements of o that are not bitwise the captured ones
        max_ulp: the largest difference of o, see `lowprec.numerics.agreement.ulp_distance`
        policy: the one used
        """
        captured = self.policy
        policy = captured if policy is None else PrecisionPolicy.parse(policy)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        impl = that_runs(policy, self.tile, impl, device, self.tensors["q"].shape[3])
        t = self._trace(policy, impl, device)
        wanted, o = self.tensors["o"], t.o.to(self.tensors["o"].dtype)
        t.policy, t.reproduced = policy, None
        t.differs = agreement.unequal(o, wanted).double().mean().item()
        if policy == captured and impl == "emulate":
            specification = t
        else:
            specification = self._trace(captured, "emulate", "cpu")
        inputs = [self.tensors[name] for name in "qkv"]
        t.max_ulp = agreement.ulp_distance(o, wanted, specification, inputs[2], captured)
        if policy == captured and impl == "triton" and self._recorded_here(device):
            t.reproduced = t.differs == 0
        elif policy == captured and impl != "oracle":
            how = (captured, self.tile, self.scale)
            t.reproduced = agreement.agrees(o, wanted, specification, *inputs, *how)
        return t

    def _recorded_here(self, device) -> bool:
        here, meta = provenance.provenance(device), self.meta
        same = [
            here["versions"].get(n) == meta["versions"].get(n) for n in ("torch", "triton", "cuda")
        ]
        return all(same) and (here["hardware"], "triton") == (meta["hardware"], meta["impl"])

    def _trace(self, policy, impl, device):
        """The trace, on the CPU. Random bits are keyed by a head's place in its batch, so a policy
        that draws any is replayed in that place, among zeros."""
        q, k, v, do = (self.tensors[name].to(device) for name in ("q", "k", "v", "do"))
        places = None
        if policy.draws:
            indices = (self.meta[name] for name in ("sequences", "call_heads"))
            places = torch.meshgrid(
                *(torch.tensor(i, device=device) for i in indices), indexing="ij"
            )
            shape = [int(p.max()) + 1 for p in places]
            q, k, v, do = (x.new_zeros(*shape, *x.shape[2:]).index_put(places, x)
                           for x in (q, k, v, do))  # fmt: skip
        how = dict(tile=self.tile, scale=self.scale, impl=impl, seed=self.meta["seed"])
        t = trace(q, k, v, do, policy, self.meta["causal"], **how)
        for name, x in vars(t).items():
            setattr(t, name, (x if places is None else x[places]).cpu())
        return t

    def query_error(self, t, rows=slice(None)) -> torch.Tensor:
        """e of each head, (H', D, C) float32, of a trace from `replay`; see
        `lowprec.training.probes`.

        rows: the queries that enter the sum, for the part that a tile of rows has in it.
        """
        q, k, x = (self.tensors[name] for name in "qkx")
        eps = torch.zeros_like(t.delta_o)
        eps[..., rows] = (t.delta_o - t.delta_ref)[..., rows]
        how = dict(scale=self.scale, policy=t.policy, impl="emulate")
        return query_error(q, k, x, eps, self.rotation, **how)


def query_gradient(capture, dq) -> torch.Tensor:
    """sum_i dQ_i x_i^T over the captured sequences, (H', D, C) float64, with rotary positions
    undone in dQ; dq: (S, H', T, D)."""
    dq = rotate(dq.double(), capture.rotation, back=True)
    return torch.einsum("shtd,stc->hdc", dq, capture.tensors["x"].double())
