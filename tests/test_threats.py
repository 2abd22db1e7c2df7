"""The hand-written pages: what they name exists, and what they say of the runs is so."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

from lowprec import claims, runs

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "book"
REGISTRY = claims.load(BOOK / "claims.yml")
THREATS = (BOOK / "threats.md").read_text()
PAGES = ("how_to_read", "threats", "shelf")
CAMPAIGNS = ("mini", "explosion", "calibration")
ON_RUNS = ("11_the_explosion", "22_one_layer")
MEND = "mend book/threats.md, which says otherwise"


def touched():
    """Claim id -> (the notebook its table names, labels of its threats)."""
    found = {}
    for part in re.split(r"^\| claim of ", THREATS, flags=re.MULTILINE)[1:]:
        notebook = re.match(r"\[[^\]]+\]\(executed/(\w+)\.ipynb\)", part)[1]
        for id, row in re.findall(r"^\| `([\w-]+)` \|(.*)\|$", part, re.MULTILINE):
            assert id not in found, f"book/threats.md lists {id} twice"
            found[id] = notebook, re.findall(r"<threat-(\w+)>", row)
    return found


def test_claims_named_exist():
    for id, (notebook, _) in touched().items():
        assert id in REGISTRY, f"book/threats.md names {id}, which claims.yml does not have"
        assert REGISTRY[id].notebook == notebook, id
    prefixes = {id.split("-")[0] for id in REGISTRY}
    for id in re.findall(r"`([a-z]+-[a-z0-9-]+)`", THREATS):
        assert id in REGISTRY or id.split("-")[0] not in prefixes, f"there is no claim {id}"


def test_every_claim_about_training_runs_is_threatened():
    rows = touched()
    for id, claim in REGISTRY.items():
        if claim.notebook in ON_RUNS:
            assert id in rows and rows[id][1], f"name a threat to {id} in book/threats.md"


def test_every_threat_touches_a_claim():
    labels = set(re.findall(r"^\(threat-(\w+)\)=$", THREATS, re.MULTILINE)) - {"table"}
    legend = re.findall(r"^\| \{ref\}`\w+ <threat-(\w+)>` \|", THREATS, re.MULTILINE)
    named = {label for _, threats in touched().values() for label in threats}
    assert labels == named == set(legend)
    assert len(labels) == len(legend) == 12 and THREATS.count("Twelve ways") == 1


def test_exploratory_claims_are_those_written_after_the_data():
    for id, (_, threats) in touched().items():
        assert REGISTRY[id].exploratory == ("after" in threats), id
    assert all(c.exploratory for c in REGISTRY.values() if c.notebook == "22_one_layer"), MEND


# Links, citations and terms, which the builder would only find out late


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_refers_to_exists(page):
    text = (BOOK / f"{page}.md").read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        source = target.replace("executed/", "../notebooks/")
        assert (BOOK / source).is_file(), f"{page} links to {target}"
    for name in re.findall(r"\{doc\}`(?:[^`<]*<)?(\w+)>?`", text):
        assert (BOOK / f"{name}.md").is_file(), f"{page} links to {name}"
    entries = re.findall(r"^@\w+\{([^,]+),", (BOOK / "references.bib").read_text(), re.MULTILINE)
    for key in re.findall(r"\{cite:[tp]\}`([^`]+)`", text):
        assert key in entries, f"{page} cites {key}"
    labels = re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE)
    for label in re.findall(r"\{ref\}`[^`<]+<([\w-]+)>`", text):
        assert label in labels, f"{page} refers to {label}"
    glossary = (BOOK / "glossary.md").read_text().splitlines()
    for term in re.findall(r"\{term\}`(?:[^`<]*<)?([^`>]+)>?`", text):
        assert term in glossary, f"{page}: the glossary has no {term}"
    for id in re.findall(r"_generated/claim-([\w-]+)\.md", text):
        assert id in REGISTRY, f"{page} shows claim {id}"


def test_the_pages_are_in_the_contents():
    parts = yaml.safe_load((BOOK / "_toc.yml").read_text())["parts"]
    files = [chapter["file"] for part in parts for chapter in part["chapters"]]
    assert set(PAGES) <= set(files)


def test_campaigns_named_exist():
    for name in ("paper", "production", "sites", "layers", "windows", "gpt2", *CAMPAIGNS):
        assert f"`{name}`" in THREATS and (ROOT / f"data/runs/{name}/campaign.yaml").is_file()


# What book/threats.md says about the recorded runs


@pytest.fixture(scope="module")
def recorded():
    return {name: runs.load_runs(name) for name in CAMPAIGNS}


def chosen(recorded, campaign, *arms):
    table = recorded[campaign]
    return list(table[table.arm.isin(arms)].run)


def rises(run, rise, monkeypatch):
    """The explosion of a run by a rule with another rise, and half of it as the way back."""
    monkeypatch.setattr(runs, "RISE", rise)
    monkeypatch.setattr(runs, "RETURN", rise / 2)
    return runs.find_explosion(run.metrics.loss)


def excess(run, settled=600):
    """By how much the mean loss is above its lowest so far, from step `settled` on."""
    mean = runs.window_mean(run.metrics.loss)
    return (mean - np.minimum.accumulate(mean))[settled:]


def test_one_corpus_one_generation_of_gpu_our_kernels(recorded):
    every = [run for table in recorded.values() for run in table.run]
    assert len({run.info["data_sha256"] for run in every}) == 1, MEND
    assert all(re.search("H100|H200", run.hardware) for run in every), MEND
    assert {run.info["impl"] for run in every} == {"triton"}, MEND
    for path in (ROOT / "data/benchmarks").glob("*.json"):
        assert re.search("H100|H200", json.dumps(json.loads(path.read_text()))), MEND


def test_sizes(recorded):
    for name, table in recorded.items():
        for config in (run.info["config"] for run in table.run):
            assert config["batch_size"] * config["block_size"] == 32768, MEND
            assert config["n_layer"] == (12 if name == "explosion" else 6), MEND
    assert {run.info["config"]["lr"] for run in recorded["mini"].run} == {4e-3}, MEND
    large = recorded["explosion"].run.iloc[0].info["config"]
    assert (large["n_embd"], large["block_size"]) == (768, 1024), MEND
    assert set(recorded["explosion"].groupby("arm").seed.nunique()) == {2, 3}, MEND


def test_a_higher_rate_is_not_always_sooner(recorded):
    low = [
        (run.info["config"]["lr"], run.explosion.onset)
        for run in recorded["calibration"].run
        if str(run.policy) == "LOW" and run.seed == 0
    ]
    onsets = [onset for _, onset in sorted(low)]
    assert len(onsets) == 4 and onsets != sorted(onsets, reverse=True), MEND


def test_onsets_of_one_seed_are_not_alike(recorded):
    onset = recorded["mini"].set_index(["arm", "seed"]).duration
    assert abs(stats.spearmanr(onset["low"].sort_index(), onset["fa2"].sort_index())[0]) < 0.3, MEND


def test_the_variant_keeps_learning_and_survivors_are_not_healthy(recorded):
    for run in chosen(recorded, "mini", "o_fp32"):
        mean = runs.window_mean(run.metrics.loss)
        assert excess(run).max() < 0.1 and mean[-1] < mean[5000], MEND
    survivors = [
        run
        for run in chosen(recorded, "explosion", "low", "fa2")
        if run.explosion is None or not run.explosion.confirmed
    ]
    assert survivors and all(excess(run).max() > 0.1 for run in survivors), MEND


def test_explosions_do_not_need_a_second_pass(recorded):
    tokens = json.loads((ROOT / "data/corpora/pysource.json").read_text())["tokens"]
    for run in chosen(recorded, "mini", "fa2"):
        assert run.explosion.onset * 32768 < tokens, MEND


@pytest.mark.parametrize("rise", [0.1, 0.25, 1, 2])
def test_with_six_layers_the_size_of_the_rise_decides_nothing(recorded, monkeypatch, rise):
    assert all(rises(r, rise, monkeypatch) for r in chosen(recorded, "mini", "low", "fa2")), MEND
    assert not any(rises(r, rise, monkeypatch) for r in chosen(recorded, "mini", "o_fp32")), MEND


def test_with_twelve_layers_it_does(recorded, monkeypatch):
    def exploded(rise):
        found = {r.name: rises(r, rise, monkeypatch) for r in recorded["explosion"].run}
        return {name for name, explosion in found.items() if explosion and explosion.confirmed}

    more = exploded(0.25) - exploded(0.5)
    assert sum(name.startswith("fa2") for name in more) == 1 and len(more) > 1, MEND


def test_less_patience_moves_onsets_of_low(recorded, monkeypatch):
    before = [run.explosion.onset for run in chosen(recorded, "mini", "low")]
    monkeypatch.setattr(runs, "PATIENCE", 100)
    after = [runs.find_explosion(r.metrics.loss).onset for r in chosen(recorded, "mini", "low")]
    assert (np.subtract(before, after) > 500).sum() > 1, MEND


def test_pairs_part_at_the_first_update(recorded):
    partners = {run.seed: run for run in chosen(recorded, "mini", "o_fp32")}
    for run in chosen(recorded, "mini", "low"):
        mine, other = run.metrics.loss, partners[run.seed].metrics.loss
        assert mine[0] == other[0] and mine[1] != other[1], MEND


def test_fa2_has_few_tied_maxima(recorded):
    before = [r.probes[r.probes.step < r.explosion.onset] for r in chosen(recorded, "mini", "fa2")]
    table = pd.concat(before)
    assert table.tied_rows.sum() < 0.001 * table.rows.sum(), MEND
