"""The hand-written pages: what they name exists, and what they say of the runs is so."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from conftest import chosen, excess
from scipy import stats

from lowprec import claims
from lowprec.evidence.heads import sums
from lowprec.numerics.policy import PrecisionPolicy
from lowprec.publish import form, limits, pages
from lowprec.records import explosion

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "book"
FOUND = claims.recorded()
REGISTRY = {
    id: SimpleNamespace(
        **vars(claim) | dict(threats=claim.doubts), doubts=claim.doubts, notebook=claim.page,
        exploratory=claim.exploratory, threshold=claim.limit, verdict=FOUND[id].verdict,
    )
    for id, claim in claims.load().items()
}  # fmt: skip
THREATS = (BOOK / "threats.md").read_text()
SHELF = (BOOK / "shelf.md").read_text()
LARGE = ("explosion", "gpt2", "specimens", "paper", "positions_large")
ARITHMETIC = set(
    "gradient-equations gradient-row-sum gradient-row-sum-dp stabilised-exact stabilised-underflow "
    "bfloat-cast bfloat-trick-nan bfloat-product-once bfloat-product-equal "
    "addition-second-operand addition-worked-example addition-carry-quarter moments-criterion "
    "moments-map parts-cumsum fourbits-speeds".split()
)
OTHER_OUTPUT = (
    ("mini", "o_fp32"), ("production", "fa2_o_fp32"), ("origin", "fa2_redrawn"),
    ("remedies", "fa2_dp", "fa2_stochastic_o_fp32"), ("rivals", "o_split"),
    ("halves", "torch_o_fp32"), ("swapped", "torch_redrawn"), ("held", "decay_o_fp32"),
    ("fp16", "fp16_o_fp32"), ("sites", "paper_o_fp32", "released_o_fp32", "both"),
    ("batches", "fa2_o_fp32_4x", "fa2_o_fp32_16x"),
)  # fmt: skip
OTHERWISE = {
    "refuted": """
        addition-remark-1 bias-held common-untrained curvature-arms curvature-tails delta-dp
        delta-other-sites drift-elsewhere eightbit-prime explosion-bias-larger-when-failing
        explosion-calibration-lowest explosion-fa2-safe explosion-low-early explosion-low-every-seed
        explosion-sigma-doubles gradient-head heads-sum-alone larger-layer larger-specimen-sign
        layer-head-alone layer-head-others layer-second-of-twelve loud-own-decay peers-gradient
        positions-large-fp32
        rivals-alike-head
        rivals-crossed-size rivals-fp16-scores rivals-held-share rivals-outside-low
        rivals-posit-bias rivals-posit-ties rivals-train-folk rivals-train-fp16 rivals-train-warmup
        rounding-ties-and-bias rounding-ties-before-take-off rounding-top-key-tied
        spike-gradient-blind spike-opposed stabilised-loud stabilised-train-floor stabilised-untied
        stabilised-untied-head
    """,
    "inconclusive": """
        common-one-sequence fix-centred-low fix-centred-norm peers-sdpa rounding-sink-no-ties
    """,
}
"""The claims that threats.md and shelf.md speak of as refuted, or as open."""
MEND = "mend book/threats.md, which says otherwise"


def test_claims_named_exist():
    for id, target in re.findall(r"`([a-z]+-[a-z0-9-]+)`(?:\]\(#claim-([a-z0-9-]+)\))?", THREATS):
        if id in REGISTRY or id.split("-")[0] in {known.split("-")[0] for known in REGISTRY}:
            assert id in REGISTRY and target == id, f"there is no claim {id}, or no link to it"


def test_every_claim_is_threatened_or_arithmetic():
    bare = {claim.id for claim in REGISTRY.values() if set(claim.threats) <= {"after"}}
    assert bare == ARITHMETIC, "say under `threats` why to doubt the claim"


def test_every_threat_touches_a_claim():
    labels = set(re.findall(r"^\(threat-(\w+)\)=$", THREATS, re.MULTILINE))
    legend = re.findall(r"^\| \{ref\}`(\w+) <threat-(\w+)>` \|", THREATS, re.MULTILINE)
    named = {word for claim in REGISTRY.values() for word in claim.threats}
    assert all(word.lower() == label for word, label in legend)
    assert named == {word for word, _ in legend} and labels == {label for _, label in legend}
    assert len(labels) == len(legend) == 15 and THREATS.count("Fifteen ways") == 1


def test_each_threat_shows_the_claims_that_name_it_and_no_other():
    threats = re.findall(r"^\| \{ref\}`(\w+) <threat-(\w+)>` \|", THREATS, re.MULTILINE)
    sections = re.split(r"^\(threat-(\w+)\)=$", THREATS, flags=re.MULTILINE)
    shown = {
        label: re.findall(r"_generated/threat-(\w+)\.md", section)
        for label, section in zip(sections[1::2], sections[2::2], strict=True)
    }
    assert shown == {label: [label] for _, label in threats}
    for word, _ in threats:
        text = pages.doubted(word, REGISTRY, REGISTRY, {})
        named = [claim.id for claim in REGISTRY.values() if word in claim.threats]
        linked = re.findall(r"\[`([\w-]+)`\]\(#claim-([\w-]+)\)", text)
        assert sorted(linked) == sorted((id, id) for id in named)
        assert f"Claims doubted for this: {len(named)}\n" in text


def test_threats_and_shelf_speak_of_claims_as_they_were_judged():
    named = set(re.findall(r'(?:#claim-|count\("|claim\(")([\w-]+)', THREATS + SHELF))
    wanted = {id: verdict for verdict, ids in OTHERWISE.items() for id in ids.split()}
    assert {id: FOUND[id].verdict for id in named} == dict.fromkeys(named, "supported") | wanted


@pytest.mark.parametrize("text, most", [(THREATS, 3500), (SHELF, 2400)], ids=["threats", "shelf"])
def test_a_page_keeps_within_what_a_reader_takes_in(text, most):
    text = re.sub(r"^:::\{dropdown\}.*?^:::$|^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"\{\{.+?\}\}", "4 of 4", text)
    assert len(form.words(text)) <= most
    told = re.sub(r"^ +\|.*$", "", text, flags=re.M).replace("\n: ", "\n\n")
    longest = max(limits.sentences([told]), key=lambda sentence: len(form.words(sentence)))
    assert len(form.words(longest)) <= limits.LIMITS["sentence"][0], longest


def test_each_prediction_of_a_campaign_is_a_claim_with_its_verdict():
    fold = THREATS.split("{dropdown} Predictions")[1].split("\n:::\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|([^|]*)\|$", fold, re.MULTILINE)
    several = dict(layers=3, fp16=4, sites=12)  # two of five are others; some are several claims
    every = []
    for name, *columns in rows:
        plan = yaml.safe_load((ROOT / f"data/runs/{name}/campaign.yaml").read_text())
        told = [said for said in plan["predictions"] if "Refuted if" in said] or plan["predictions"]
        held, rest = (re.findall(r"`([\w-]+)`", text) for text in columns)
        assert len(held + rest) == several.get(name, len(told)), f"{name}: {MEND}"
        assert all((FOUND[id].verdict == "supported") == (id in held) for id in held + rest), name
        every += held + rest
    assert len(rows) == 25 and len(set(every)) == len(every)


# What the runs are, as book/threats.md says


def of_other_output(recorded):
    """The runs with 6 layers whose delta reads something else than the stored output."""
    return [run for names in OTHER_OUTPUT for run in chosen(recorded, *names)]


def test_one_corpus_one_generation_of_gpu_our_kernels(recorded):
    every = [run for table in recorded.values() for run in table.run]
    whole = [run for run in every if run.info["arm"] not in ("noise", "shuffled")]
    assert len({run.info["data_sha256"] for run in whole}) == 1, MEND
    theirs = {("production", "sdpa"): "sdpa", ("halves",): "sdpa_forward",
              ("swapped",): "sdpa_backward"}  # fmt: skip
    for campaign, table in recorded.items():
        for run in table.run:
            kernel = theirs.get((campaign,), theirs.get((campaign, run.info["arm"]), "triton"))
            assert run.info["impl"] == kernel and re.search("H100|H200", run.hardware), MEND
    for path in [*(ROOT / "data/benchmarks").glob("*.json"), *(ROOT / "data/peers").glob("*.json")]:
        assert re.search("H100|H200", path.read_text()), MEND


def test_how_many_runs_an_h100_made(recorded):
    many = {
        name: sum("H100" in run.hardware for run in table.run) for name, table in recorded.items()
    }
    told = re.search(r"H100 for (.*?); one GPU a run", (BOOK / "rerun.md").read_text())[1]
    words = dict(zip("four seven eight ten twelve".split(), (4, 7, 8, 10, 12), strict=True))
    said = {}
    for count, names in re.findall(r"(\w+) (?:runs |each )?of ((?:`\w+`(?: and )?)+)", told):
        said |= dict.fromkeys(re.findall(r"\w+(?=`)", names), words.get(count) or int(count))
    assert said == {name: count for name, count in many.items() if count}


def test_sizes(recorded):
    for name, table in recorded.items():
        for run in table.run:
            config, times = run.info["config"], 16 if name == "paper" else 1
            if name == "batches":
                times = 16 if run.info["arm"].endswith("_16x") else 4
            usual = 4_096 if name in ("eight", "eight_llama") else 32_768
            assert config["batch_size"] * config["block_size"] == times * usual, MEND
            assert config["n_layer"] == (12 if name in LARGE else 6), MEND
    large = recorded["explosion"].run.iloc[0].info["config"]
    assert (large["n_embd"], large["block_size"]) == (768, 1024), MEND
    for name, seeds in (("explosion", {2, 3}), ("gpt2", {3}), ("paper", {1})):
        assert set(recorded[name].groupby("arm").seed.nunique()) == seeds, MEND


def test_every_run_that_a_campaign_announces_is_recorded(recorded):
    for name, table in recorded.items():
        plan = yaml.safe_load((ROOT / f"data/runs/{name}/campaign.yaml").read_text())
        planned = {(arm, seed) for arm, of in plan["arms"].items() for seed in of["seeds"]}
        there = set(zip(table.arm, table.seed, strict=True))
        assert there == planned, f"{name}: {planned ^ there}"


def test_with_six_layers_and_another_output_no_loss_rises(recorded):
    runs_ = of_other_output(recorded)
    assert len(runs_) > 60 and max(excess(run).max() for run in runs_) < 0.1, MEND


def test_what_keeps_statements_of_the_paper_untested(recorded):
    """book/statements.yml: why no claim tests them."""
    said = {s["id"]: s for s in pages.statements.load(BOOK) if "untested" in s}
    assert {s["threat"] for s in said.values()} <= {w for c in REGISTRY.values() for w in c.threats}
    every = [run for table in recorded.values() for run in table.run]
    most = max(len(run.metrics) for run in every if "beta=" in str(run.policy))
    assert most == 7_000 and "7,000 steps" in said["stabilised-longer"]["untested"]
    long = {run.info["arm"] for run in every if len(run.metrics) > 8_000}
    assert long == {"lr_quarter", "low", "o_fp32", "clean", "free", "long"}, (
        "mend the reviewers' table of shelf.md"
    )
    widest = {tuple(run.info["config"][k] for k in ("n_layer", "n_embd")) for run in every}
    assert max(widest) == (12, 768), "that is GPT-2 of 124 million weights"


def test_explosions_do_not_need_a_second_pass(recorded):
    tokens = json.loads((ROOT / "data/corpora/pysource.json").read_text())["tokens"]
    for run in chosen(recorded, "mini", "fa2"):
        assert run.explosion.onset * 32768 < tokens, MEND


@pytest.mark.parametrize(
    "runs_, chosen_",
    {
        "`LOW` and `FA2`, 6 layers": (("mini", "low", "fa2"),),
        "δ from another output, `FA2`'s P∘dP, 16 bits, 6 layers, learned positions": OTHER_OUTPUT,
        "PyTorch's kernel": (("production", "sdpa"),),
        "`LOW` with weight decay": (("rivals", "decay"),),
        "`LOW` with β = 1.01": (("held", "untied_loud"),),
        "`LOW` and `FA2`, 12 layers, lower rate": (("explosion", "low", "fa2"),),
    }.items(),
)
def test_what_another_rule_would_count(recorded, monkeypatch, runs_, chosen_):
    losses = [run.metrics.loss for names in chosen_ for run in chosen(recorded, *names)]
    rules = [{}, *(dict(RISE=x, RETURN=x / 2) for x in (0.25, 2))]
    rules += [dict(PATIENCE=x) for x in (300, 100)]
    counts = []
    for rule in rules:
        with monkeypatch.context() as patch:
            for name, value in rule.items():
                patch.setattr(explosion, name, value)
            counts.append(sum(explosion.find_explosion(loss) is not None for loss in losses))
    first, *rest = map(str, counts)
    assert f"| {' | '.join([runs_, f'{first} of {len(losses)}', *rest])} |" in THREATS, counts


@pytest.mark.parametrize("n", [8, 4, 3, 2])
def test_what_so_many_seeds_can_say(n):
    every, none = (stats.binomtest(count, n).proportion_ci() for count in (n, 0))
    assert f"| {n} | {every.low:.0%} | {none.high:.0%} |".replace("%", " %") in THREATS


def test_pytorch_chose_its_flash_kernel(recorded):
    """When these runs were made `sdpa` left the choice to PyTorch, which may be cuDNN."""
    first = {
        arm: {run.seed: run.metrics.loss[0] for run in chosen(recorded, campaign, arm)}
        for campaign, arm in (("production", "sdpa"), ("halves", "torch_o"), ("mini", "fa2"))
    }
    for seed, loss in first["torch_o"].items():
        assert first["sdpa"][seed] == loss != first["fa2"][seed], MEND
    for run in recorded["swapped"].run:
        assert run.metrics.loss[0] == first["sdpa"][run.seed], MEND


def test_measured_has_the_size_that_was_measured(recorded):
    """The shares of `measured` and a_bias_is_enough: FA2's by layer, medians of 8 runs, rounded."""
    shares = []
    for run in chosen(recorded, "mini", "fa2"):
        by_layer = sums(run, 499, 1499).groupby("layer")[["delta_bias", "delta_abs"]].sum()
        shares.append(by_layer.delta_bias / by_layer.delta_abs)
    of_layers = np.median(shares, axis=0)
    plan = yaml.safe_load((ROOT / "data/runs/measured/campaign.yaml").read_text())["arms"]
    for arm, part in (("size-1x", 1), ("size-half", 2)):
        put = [PrecisionPolicy.parse(p).delta_bias for p in plan[arm]["layers"].values()]
        assert [f"{part * x:.0e}" for x in put] == [f"{share:.0e}" for share in of_layers[:5]]
    other = PrecisionPolicy.parse(plan["elsewhere"]["policy"]).delta_bias
    assert abs(of_layers[5]) < 1e-5 and f"{other:.0e}" == f"{of_layers[1]:.0e}"


# What first screens say without computing it


def test_no_prediction_on_recorded_sums_held():
    books = "delta-dodo-noise delta-dodo-no-bias delta-numerator-bias delta-fa2-bias delta-dp"
    assert {REGISTRY[id].verdict for id in books.split()} == {"refuted"}, "delta_carries_it does"
