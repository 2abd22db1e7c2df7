"""One figure: its style, a colour for each policy, labels, and the data behind it beside it.

`save_figure` shows a figure as an inline SVG whose ink is the page's text colour, so that it reads
on a white and on a dark background, with its caption, its alternative text, a badge that says
whether it was computed here or recorded on a GPU, its table as a CSV download, and the runs that it
was drawn from.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import re
import tempfile
from pathlib import Path
from urllib.parse import quote

import matplotlib
import matplotlib.pyplot as plt
import pandas as pd

from lowprec import UserError
from lowprec.evidence.words import FIGURE_MIME, minus
from lowprec.numerics.policy import PrecisionPolicy
from lowprec.publish.lean import lean
from lowprec.records.files import repo_root

COLOURS = {
    "LOW": "#e8590c",
    "LOW+delta_from=o_fp32": "#2395f8",
    "FA2": "#7335fe",
    "PAPER": "#983eab",
    "RELEASED": "#a65335",
    "ALL_FP32": "#808080",
}
"""Each at least 3:1 against a white and a dark page, and told apart by readers with any of the
common colour deficiencies."""
SPARE = ("#23a774", "#b28f00", "#d80b11", "#4f97ba", "#869a56", "#b68884")

INK = "#1a1a1a"
"""Text, axes and grid: replaced in the SVG by the page's own text colour."""
STYLE = {
    "figure.figsize": (5.4, 3.6),
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "font.size": 11,
    "axes.labelsize": 11,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.18,
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "svg.fonttype": "path",
    "axes.prop_cycle": matplotlib.cycler(color=[*COLOURS.values(), *SPARE]),
    **{f"{part}.color": INK for part in ("text", "xtick", "ytick", "grid")},
    **{f"axes.{part}": INK for part in ("edgecolor", "labelcolor", "titlecolor")},
}

LETTERS = str.maketrans("0123456789", "ghijklmnop")
"""A name's hash as letters alone, with which an id begins."""
MAX_CSV = 400_000
"""Bytes of CSV behind one figure."""
COMMON = ",.-+:;/()*"
"""What a table may have in an address as it is."""
MIN_SCALE = 62
"""Pixels an inch below which a figure scrolls inside its own frame instead of shrinking: 11-point
text is then 9.5 pixels high. A figure of 5.4 inches or less fits on a phone."""


def colour(policy) -> str:
    """The colour of a policy: of the preset that it changes, or, where delta does not read the
    stored output, the blue of LOW+delta_from=o_fp32."""
    policy = PrecisionPolicy.parse(policy)
    healthy = policy.delta_from != "o"
    return COLOURS["LOW+delta_from=o_fp32" if healthy else str(policy).partition("+")[0]]


def hue(given: str) -> str:
    """A colour given as "#rrggbb", or as the policy whose colour it is."""
    return given if given.startswith("#") else colour(given)


def tint(config) -> str:
    """The colour of a run or an arm, by its config: that of its policy, or green if the output that
    δ reads is that of PyTorch's kernel, or ink if layers have policies of their own.

    config: a `TrainConfig`, or the one of a run.json.
    """
    config = config if isinstance(config, dict) else vars(config)
    if config.get("layers"):
        return INK
    own = colour(config["policy"])
    torchs = str(config.get("impl")).startswith("sdpa") and own == COLOURS["FA2"]
    return SPARE[0] if torchs else own


def look(policy) -> dict:
    """Colour and dashes of a policy's line: one in COLOURS is solid, another dashed, or dotted if
    it changes o_acc."""
    line = "-" if str(policy) in COLOURS else ":" if "+o_acc=" in str(policy) else "--"
    return dict(color=colour(policy), ls=line)


def subplots(*args, **kwargs):
    """`matplotlib.pyplot.subplots` in the book's style."""
    plt.rcParams.update(STYLE)
    return plt.subplots(*args, **kwargs)


def luminance(rgb) -> float:
    """Relative luminance of an sRGB colour, each part from 0 to 1 (WCAG 2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink_on(colour) -> str:
    """Black or white, whichever reads better on an (r, g, b, ...): at least 4.5:1, in both themes,
    for text inside an area that keeps its colour. Such a text needs a gid of its own."""
    dark = "#010101"  # pure black is no colour in the SVG, which then takes the page's
    return "#ffffff" if luminance(colour[:3]) < 0.18 else dark


def show_table(frame: pd.DataFrame, **formats):
    """A table of results for the page, without its index; formats: column to format string or
    function. A page shows its negative numbers with a minus sign
    (`lowprec.publish.notebook.as_page`).

    Columns whose names are not identifiers go in as `**{"gradient norm": "{:.2f}"}`.
    """
    # The class gives it the theme's table style, light and dark; a fixed id keeps pages equal.
    styler = frame.style.hide(axis="index").format(formats).set_uuid("t")
    return styler.set_table_attributes('class="dataframe"')


def save_figure(
    fig, table: pd.DataFrame, name: str, alt: str, caption: str, hardware=None, runs=None,
    moving: str = "",
) -> None:  # fmt: skip
    """Show a figure on its page with caption, badge and data, and close it.

    table: the numbers drawn, at most 400 kB as CSV. name: short and unique on its page, a-z, 0-9
    and "-". alt: what the figure shows, for a reader who cannot see it. runs: the recorded runs it
    is drawn from, as `lowprec.records.runs.Run` or a table with them in column `run`; their number,
    arms, policies, seeds and hardware are shown. Those in the folder for temporary files were made
    on the page and are not named.
    hardware: without runs, the machine that made the data, if it was not computed on this page; or
    that of each piece, "CPU" for one that was.
    moving: what `lowprec.publish.film` embeds, as JSON.
    """
    from IPython.display import display

    data, metadata = bundle(fig, table, name, alt, caption, hardware, runs, moving)
    plt.close(fig)
    display(data, metadata=metadata, raw=True)


def bundle(
    fig, table, name, alt, caption, hardware=None, runs=None, moving=""
) -> tuple[dict, dict]:
    """The output of `save_figure` as (data by MIME type, metadata)."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise UserError(f"figure name {name!r} must be made of a-z, 0-9 and single hyphens")
    for part, text in (("alt", alt), ("caption", caption)):
        if not text.strip():
            raise UserError(f"figure {name} has no {part} text: say what it shows")
    csv = table.to_csv(index=False, float_format="%.9g", lineterminator="\n").encode()
    if len(csv) > MAX_CSV:
        raise UserError(
            f"the table of figure {name} is {len(csv):,} bytes of CSV and {MAX_CSV:,} is the most: "
            f"keep every n-th row, or only the columns that are drawn"
        )
    alt, caption = minus(alt), minus(caption)
    runs = list(getattr(runs, "run", runs)) if runs is not None else []
    runs = [run for run in runs if not _on_page(run.path.resolve())]
    if runs:
        hardware = ["a CPU" if run.hardware == "CPU" else run.hardware for run in runs]
    if hardware is not None and not isinstance(hardware, str):
        hardware = " and ".join(sorted(set(hardware) - {"CPU"})) or None
    about = {"name": name, "id": f"figure-{name}", "alt": alt, "caption": caption,
             "hardware": hardware, "runs": name_runs(runs)}  # fmt: skip
    data = {
        "text/plain": f"Figure {name}: {alt}",
        "text/html": _html(svg(fig, name, alt), csv, about, moving),
        "image/png": base64.b64encode(png(fig, alt)).decode(),
        FIGURE_MIME: about,
    }
    return data, {"image/png": {"alt": alt}}


def _on_page(path: Path) -> bool:
    """Whether the page made a run: it is among temporary files, and not in a clone there."""
    scratch = Path(tempfile.gettempdir()).resolve()
    return scratch in path.parents and repo_root().resolve() not in path.parents


def name_runs(runs) -> list[str]:
    """How many runs, then a line for each campaign: its arms, their policies and seeds."""
    arms: dict = {}
    for run in runs:
        config = run.info["config"]
        own = [f"{k} {config[k]}" for k in ("impl", "tile") if config.get(k) not in (None, "auto")]
        for place, policy in (config.get("layers") or {}).items():
            own.append(f"layer {place.replace('/', ' heads ')} {policy}")
        arm = f"{run.info['arm']} ({', '.join([str(run.policy), *own])})"
        arms.setdefault(run.path.parent.name, {}).setdefault(arm, set()).add(run.seed)
    counts = [len(seeds) for found in arms.values() for seeds in found.values()]
    lines = [
        f"{campaign}: " + "; ".join(f"{arm} {_ranges(seeds)}" for arm, seeds in found.items())
        for campaign, found in arms.items()
    ]
    many = f"{sum(counts)} runs" + f" of {len(counts)} arms" * (len(counts) > 1)
    return [f"Drawn from {many if sum(counts) > 1 else '1 run'}", *lines] if lines else []


def _ranges(seeds) -> str:
    """Whole numbers in words: seeds 0–3, 6."""
    ends: list = []
    for seed in sorted(seeds):
        if ends and seed == ends[-1][1] + 1:
            ends[-1][1] = seed
        else:
            ends.append([seed, seed])
    parts = [f"{a}" if a == b else f"{a}–{b}" if b > a + 1 else f"{a}, {b}" for a, b in ends]
    return ("seeds " if len(seeds) > 1 else "seed ") + ", ".join(parts)


def svg(fig, name: str, alt: str) -> str:
    """The figure as an inline SVG element: ids of its own, no background, ink in currentColor."""
    raw = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with plt.rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        fig.savefig(raw, format="svg", metadata=nothing, facecolor="none")
    text = raw.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"#(1a1a1a|000000)\b", "currentColor", text)
    text = text.replace("DejaVuSans-", "").replace("xlink:href", "href")
    text = _short_ids(text, hashlib.sha1(name.encode()).hexdigest()[:5].translate(LETTERS))
    box = re.search(r'viewBox="[^"]+"', text)[0]
    width = float(box.split()[2])
    head = (
        f'<svg {box} role="img" aria-label="{html.escape(alt)}" fill="currentColor" '
        f'style="display:block;width:100%;min-width:{width / 72 * MIN_SCALE:.0f}px;'
        f'max-width:{width * 4 / 3:.0f}px" '
        f'xmlns="http://www.w3.org/2000/svg">'
    )
    text = re.sub(r"<!--.*?-->", "", text[text.index(">") + 1 :], flags=re.DOTALL)
    return head + lean(text.removesuffix("</svg>\n")) + "</svg>"


def _short_ids(text: str, name: str) -> str:
    """Ids that begin with a name, a figure's own on its page, for what is referred to and for texts
    outside cells; no ids for the rest, which are a tenth of a figure's bytes."""
    used = dict.fromkeys(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    new = {old: f"{name}{i}" for i, old in enumerate(used)}
    new |= {old: f"{name}-{old}" for old in re.findall(r'\bid="(text_\d+)"', text)}
    text = re.sub(r'\s*\bid="([^"]+)"', lambda m: f' id="{new[m[1]]}"' if m[1] in new else "", text)
    return re.sub(r'(href="#|url\(#)([^")]+)', lambda m: m[1] + new[m[2]], text)


def png(fig, alt: str) -> bytes:
    """The figure on white in 256 colours, for readers of the notebook where HTML is not shown.

    The colours are a third of the bytes of all, and look the same.
    """
    from PIL import Image, PngImagePlugin

    drawn, raw, about = io.BytesIO(), io.BytesIO(), PngImagePlugin.PngInfo()
    fig.savefig(drawn, format="png", dpi=100, facecolor="white")
    image = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    about.add_itxt("Description", alt)
    image.save(raw, format="png", optimize=True, pnginfo=about)
    return raw.getvalue()


def _html(image: str, csv: bytes, about: dict, moving: str) -> str:
    film = (
        f'\n<div class="lowprec-film"><script type="application/json">{moving}</script></div>'
        if moving
        else ""
    )
    badge = f"recorded on {about['hardware']}" if about["hardware"] else "computed on this page"
    link = "data:text/csv," + quote(csv, safe=COMMON)
    runs = ""
    if about["runs"]:
        count, *lines = (html.escape(line).replace("+", "<wbr/>+") for line in about["runs"])
        style = "font-size:0.8rem;overflow-wrap:anywhere"
        runs = f"""
<details class="lowprec-runs" style="{style}"><summary>{count}</summary>
{"<br/>".join(lines)}</details>"""
    return f"""<figure class="lowprec-figure" id="{about["id"]}" style="margin:1em 0">
<div class="lowprec-scroll" style="overflow-x:auto" tabindex="0">
{image}
</div>{film}
<figcaption>{html.escape(about["caption"])}
<span class="lowprec-badge">{html.escape(badge)}</span>
<a class="lowprec-data" download="{about["name"]}.csv" href="{link}">data (CSV)</a>{runs}
</figcaption>
</figure>"""
