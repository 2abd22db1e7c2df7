"""SmolLM2-135M seen once, for pages that need a pretrained model and no download.

The model is `lowprec.diagnose.pretrained`'s, in float32 on the CPU; the text is the first 512
tokens of the two licences in this repository, `data/corpora/smoke.LICENSE.txt` and `LICENSE`, one
sequence, with no token before them. `captured` reads what some layers had there, in BF16.
`sinks` and `residuals` say where attention goes and how large the stream between the layers is.

python -m lowprec.studies.smollm2 data/studies/smollm2      DATE-sinks, DATE-residuals .parquet
python -m lowprec.studies.smollm2 --captures FOLDER         what data/captures/smollm2 has
"""

from __future__ import annotations

import argparse
import importlib.util
import lzma
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes

from lowprec import UserError, entry
from lowprec.diagnose import pretrained
from lowprec.records import files
from lowprec.studies import dated
from lowprec.training.rotary import rotate, rotation

PARAMETERS = dict(tokens=512)
"""Those of the tables."""
BASE = 100_000.0
"""Of the model's rotary positions, over all 64 channels of a head."""
QK = (11, 18, 23)
"""Layers whose q and k are kept: one whose heads hardly look at the first token, and two with the
strongest sinks."""
GATED = (6, 11, 14, 28, 29)
"""Layers whose gate and up are kept: those with a channel above 400, and two without."""
GATED_TOKENS = 128
"""The first tokens of the text, of which gate and up are kept, with all 1,536 channels."""
XZ = [dict(id=lzma.FILTER_LZMA1, preset=6, lc=3, lp=1, pb=1)]
"""As `lowprec.training.capture.XZ`, in the older container: nothing takes it for a capture."""


def text() -> str:
    """What is read."""
    root = files.repo_root()
    parts = (files.data_root() / "corpora" / "smoke.LICENSE.txt", root / "LICENSE")
    return "\n".join(path.read_text() for path in parts)


def text_of(where: str) -> str:
    """A text that models are judged on: "PACKAGE/FILE" of an installed package, or "book/FILE"."""
    package, _, name = where.partition("/")
    spec = importlib.util.find_spec(package) if package != "book" else None
    path = Path(spec.origin).parent / name if spec else files.repo_root() / where
    if not path.is_file():
        raise UserError(f"{path} is not there: install jinja2 3.1.6")
    return path.read_text()


def _folder() -> Path:
    return files.data_root() / "captures" / "smollm2"


def captured(kind: str, layer: int) -> dict[str, torch.Tensor]:
    """BF16 of a layer, on the first tokens of `text`.

    kind "qk", layers `QK`: q (9, 512, 64) and k (3, 512, 64) before rotation; heads of queries 0 to
    2 read the first head of keys, and so on. kind "gated", layers `GATED`: gate and up (128, 1536),
    of silu(gate) * up. Raises `UserError` for a layer that is not kept.
    """
    path = _folder() / f"{kind}-{layer:02}.safetensors.lzma"
    if not path.is_file():
        kept = ", ".join(sorted(p.name.split(".")[0] for p in _folder().glob("*.lzma")))
        raise UserError(f"{path.name} is not kept of SmolLM2; there are {kept}")
    return from_bytes(lzma.decompress(path.read_bytes()))


def turned(x) -> torch.Tensor:
    """q or k (..., T, 64) of `captured` at its places, float32: what attention reads, but for the
    rounding to BF16 before."""
    return rotate(x.float(), rotation(x.shape[-2], x.shape[-1], BASE))


@torch.no_grad()
def observe(tokens: int) -> dict:
    """One forward of the model: gate, up, q, k by layer, the stream after each layer, attention
    (layers, heads, T, T); float32."""
    path = pretrained.real_path()
    model, _ = pretrained.load(path)
    model.set_attn_implementation("eager")
    ids = torch.tensor([pretrained.tokenizer(path)(text())["input_ids"][:tokens]])
    seen = {name: {} for name in ("gate", "up", "q", "k", "stream")}

    def keep(name, layer):
        def hook(module, given, out):
            seen[name][layer] = (out if torch.is_tensor(out) else out[0]).view(*ids.shape, -1)[0]

        return hook

    for i, layer in enumerate(model.model.layers):
        for name in ("gate", "up"):
            getattr(layer.mlp, f"{name}_proj").register_forward_hook(keep(name, i))
        for name in ("q", "k"):
            getattr(layer.self_attn, f"{name}_proj").register_forward_hook(keep(name, i))
        layer.register_forward_hook(keep("stream", i))
    out = model(input_ids=ids, labels=ids, output_attentions=True)
    for name in ("q", "k"):
        heads = (-1, model.config.head_dim)
        seen[name] = {i: x.unflatten(1, heads).transpose(0, 1) for i, x in seen[name].items()}
    return seen | dict(attention=torch.cat(out.attentions), loss=out.loss.item())


def sinks(seen: dict) -> pd.DataFrame:
    """A row a layer and head: sink, the attention to the first token, mean over the later ones."""
    mass = seen["attention"][:, :, 1:, 0].mean(-1)
    places = [(i, h) for i in range(len(mass)) for h in range(mass.shape[1])]
    table = pd.DataFrame(places, columns=["layer", "head"])
    return table.assign(sink=mass.flatten().numpy())


def residuals(seen: dict) -> pd.DataFrame:
    """A row a layer, of the stream after it and of silu(gate) * up in it: the largest value in
    size, with its sign, where it is, and the median over features of their largest."""
    rows = []
    for layer, stream in seen["stream"].items():
        product = torch.nn.functional.silu(seen["gate"][layer]) * seen["up"][layer]
        row = dict(layer=layer)
        for name, x in (("stream", stream), ("gated", product)):
            token, feature = divmod(int(x.abs().argmax()), x.shape[1])
            row |= {f"{name}_token": token, f"{name}_feature": feature}
            row |= {f"{name}_largest": x[token, feature].item()}
            row |= {f"{name}_median": x.abs().amax(0).median().item()}
        rows.append(row)
    return pd.DataFrame(rows)


def measure(tokens: int) -> dict[str, pd.DataFrame]:
    """The tables `sinks` and `residuals`."""
    seen = observe(tokens)
    return dict(sinks=sinks(seen), residuals=residuals(seen))


def summary(sinks: pd.DataFrame) -> dict[str, float]:
    """mean: attention to the first token over all heads; above: share of heads with more than half;
    heads: how many these are."""
    above = sinks.sink > 0.5
    return dict(mean=float(sinks.sink.mean()), above=float(above.mean()), heads=int(above.sum()))


def capture(folder: Path) -> None:
    """Write the files of `captured`."""
    seen = observe(**PARAMETERS)
    kept = {("qk", i): dict(q=seen["q"][i], k=seen["k"][i]) for i in QK}
    for i in GATED:
        kept["gated", i] = {name: seen[name][i][:GATED_TOKENS] for name in ("gate", "up")}
    files.make_folder(folder)
    for (kind, layer), tensors in kept.items():
        content = to_bytes({n: x.bfloat16().contiguous() for n, x in tensors.items()})
        packed = lzma.compress(content, lzma.FORMAT_ALONE, filters=XZ)
        path = folder / f"{kind}-{layer:02}.safetensors.lzma"
        files.write_atomic(path, lambda file, packed=packed: file.write(packed))


def main(argv: list[str] | None = None) -> None:
    """Measure SmolLM2-135M on the licences of this repository."""
    parser = argparse.ArgumentParser(prog="python -m lowprec.studies.smollm2", add_help=False)
    parser.add_argument("--captures", type=Path)
    known, rest = parser.parse_known_args(argv)
    if known.captures:
        torch.set_num_threads(1)
        capture(known.captures)
    else:
        dated.command("smollm2", main.__doc__, measure, rest, **PARAMETERS)


if __name__ == "__main__":
    entry(main)
