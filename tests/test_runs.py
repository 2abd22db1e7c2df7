"""Run folders, what counts as an explosion, and the manifest."""

import ast
import contextlib
import hashlib
import json
import math
import re
import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from lowprec import UserError
from lowprec.evidence import registry
from lowprec.records import explosion, files, manifest, provenance, runs
from lowprec.records.explosion import Explosion, excess, find_explosion, window_mean
from lowprec.records.runs import load_run, load_runs
from lowprec.records.tables import write_table

CALM = 1.0 + 2.0 * np.exp(-np.arange(2000) / 200)


def with_rise(height, start=1200, length=None, total=2000):
    loss = CALM[:total].copy()
    loss[start : None if length is None else start + length] += height
    return loss


def test_a_lasting_rise_is_an_explosion():
    e = find_explosion(with_rise(1.0))
    assert e.confirmed and 1200 < e.onset < 1250, "the 50-step mean reaches 0.5 midway"


def test_a_rise_that_comes_back_is_a_spike():
    assert find_explosion(with_rise(3.0, length=300)) is None
    assert find_explosion(with_rise(3.0, length=600)).confirmed, "back only after the 500 steps"


@pytest.mark.parametrize("rest, lasts", [(0.2, False), (0.3, True)])
def test_it_has_come_back_within_a_quarter_of_a_nat(rest, lasts):
    loss = with_rise(rest)
    loss[1200:1260] += 3.0 - rest
    assert (find_explosion(loss) is not None) == lasts


@pytest.mark.parametrize("high, lasts", [(451, False), (452, True)])
def test_it_has_come_back_within_500_steps(high, lasts):
    loss = np.full(2000, 2.0)
    loss[700 : 700 + high] = 27  # from the first on up by 0.5, and down 50 steps after the last
    assert (find_explosion(loss) is not None) == lasts


def test_a_rise_is_held_against_the_lowest_before_it():
    assert find_explosion([4.0] * 400 + [7.0] * 100 + [4.0] * 600 + [2.0] * 900) is None
    assert explosion.rise([2.0] * 600 + [52.0]) == 1


def test_a_small_rise_is_a_divergence():
    assert find_explosion(with_rise(0.45)) is None


def test_a_rise_at_the_end_is_not_confirmed():
    e = find_explosion(with_rise(1.0, start=1700))
    assert e is not None and not e.confirmed
    exactly = with_rise(1.0, start=1200)
    onset = find_explosion(exactly).onset
    assert find_explosion(exactly[: onset + 501]).confirmed
    assert not find_explosion(exactly[: onset + 500]).confirmed


def test_non_finite_is_an_explosion_at_once():
    loss = CALM.copy()
    loss[700:] = np.nan
    assert find_explosion(loss) == explosion.Explosion(700, True)
    loss[650:700] += 5
    assert find_explosion(loss).onset < 700 and find_explosion(loss).confirmed
    assert find_explosion([float("inf")]) == explosion.Explosion(0, True)


def test_nothing_happens_to_nothing():
    assert find_explosion([]) is None and find_explosion(CALM) is None


def test_a_huge_finite_loss_hides_no_later_explosion():
    loss = with_rise(1.0, start=1200)
    loss[100] = 1e30
    assert find_explosion(loss) == find_explosion(with_rise(1.0, start=1200))
    assert find_explosion([*CALM[:100], 1e30, *CALM[100:]]) is None


def test_window_mean_is_trailing():
    values = np.random.default_rng(0).normal(size=200)
    mean = window_mean(values)
    assert mean[120] == pytest.approx(values[71:121].mean()) and mean[0] == values[0]


def test_excess_is_measured_from_the_lowest_mean_so_far():
    above = excess([3.0] * 100 + [2.0] * 100 + [2.5] * 100 + [1.0] * 100)
    assert above.min() == 0 and above.max() == pytest.approx(0.5)
    assert above[249] == pytest.approx(0.5) and above[199] == above[-1] == 0


@pytest.fixture
def folder(tmp_path):
    source = files.data_root() / "runs" / "explosion" / "low-seed1"
    return shutil.copytree(source, tmp_path / "low-seed1")


def test_load(folder):
    run = load_run(folder)
    assert str(run.policy) == "LOW" and run.seed == 1 and run.info["impl"] == "triton"
    assert run.info["steps"] == len(run.metrics) and run.explosion.confirmed
    commit = run.info["commit"]
    assert len(commit) == 40 and set(commit) <= set("0123456789abcdef"), "a clean tree recorded it"
    table = load_runs(folder.parent)
    assert list(table.name) == ["low-seed1"] and bool(table.exploded[0])


def test_a_summary_has_the_best_loss_of_a_run_that_ended_without_one(folder):
    metrics = load_run(folder).metrics
    metrics.loc[len(metrics) - 1, "loss"] = np.nan
    write_table(folder / "metrics.parquet", metrics)
    best = window_mean(metrics.loss[:-1]).min()
    assert (
        f"loss       nan over the last 50 steps, {best:.4f} at best" in load_run(folder).summary()
    )


def test_a_campaign_counts_what_is_confirmed(tmp_path):
    """One run that exploded, one whose rise was seen for 300 steps, one in which nothing rose."""
    losses = dict(exploded=with_rise(1.0), rising=with_rise(1.0, start=1700), calm=CALM[:1500])
    for arm, loss in losses.items():
        (tmp_path / f"{arm}-seed0").mkdir()
        metrics = pd.DataFrame(dict(step=range(len(loss)), loss=loss, grad_norm=1.0))
        write_table(tmp_path / f"{arm}-seed0" / "metrics.parquet", metrics)
        config = dict(policy="LOW", seed=0)
        info = dict(arm=arm, config=config, hardware="CPU", ended="completed", steps=len(loss))
        (tmp_path / f"{arm}-seed0" / "run.json").write_text(json.dumps(info))
    table = load_runs(tmp_path).set_index("arm")
    assert table.exploded.to_dict() == dict(exploded=True, rising=False, calm=False)
    onset = find_explosion(losses["exploded"]).onset
    assert table.duration.to_dict() == dict(exploded=onset, rising=onset + 500, calm=1500)
    assert table.steps.to_dict() == dict(exploded=2000, rising=2000, calm=1500)
    assert set(table.layers) == {""}
    own = load_runs("layers").set_index("arm").layers
    assert set(own["only1"]) == {"1: FA2"} and own.ne("").all()


def test_an_older_run_has_its_learning_rates_as_well(folder):
    run = load_run(folder)
    older = run.metrics.assign(lr=np.float32(1e-3))
    write_table(folder / "metrics.parquet", older)
    again = load_run(folder)
    assert again.metrics.equals(older) and again.summary() == run.summary()


@pytest.mark.parametrize(
    "damage,words",
    [
        (lambda f: (f / "run.json").unlink(), ("run.json",)),
        (lambda f: (f / "run.json").write_text("{"), ("run.json", "restore")),
        (lambda f: (f / "run.json").write_text("{}"), ("run.json", "restore")),
        (lambda f: (f / "metrics.parquet").unlink(), ("metrics.parquet", "restore")),
        (lambda f: (f / "metrics.parquet").write_bytes(b"x" * 50), ("metrics.parquet", "damaged")),
        (lambda f: truncate(f / "metrics.parquet"), ("metrics.parquet", "damaged")),
        (lambda f: shorten(f / "metrics.parquet"), ("metrics.parquet", "steps")),
        (lambda f: shutil.rmtree(f), ("no run folder", "low-seed1")),
    ],
)
def test_damaged_folders_are_named(folder, damage, words):
    damage(folder)
    with pytest.raises(UserError) as error:
        load_run(folder)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_damaged_probes_are_named_when_read(folder):
    truncate(folder / "probes.parquet")
    with pytest.raises(UserError, match="probes.parquet"):
        load_run(folder).probes  # noqa: B018


def test_an_empty_table_is_no_run_s(folder):
    (folder / "probes.parquet").write_bytes(b"")
    for read in (lambda: load_run(folder), lambda: load_runs(folder.parent)):
        with pytest.raises(
            UserError, match="low-seed1/probes.parquet is damaged .*from a copy, or"
        ):
            read()


def test_probes_without_rows_are_those_of_a_run_that_goes_on(folder):
    write_table(folder / "probes.parquet", load_run(folder).probes.iloc[:0])
    with pytest.raises(UserError, match="low-seed1/probes.parquet has no rows; restore it from a"):
        load_run(folder)
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(info | dict(ended="stopped")))
    assert load_run(folder).probes.empty


def test_a_recorded_run_is_restored_from_git_and_one_s_own_is_not(folder, monkeypatch):
    truncate(folder / "metrics.parquet")
    with pytest.raises(UserError) as own:
        load_run(folder)
    assert "from git" not in str(own.value) and "train it again" in str(own.value)
    monkeypatch.setattr(runs, "data_root", lambda: folder.parent)
    with pytest.raises(UserError, match="restore it from git, `python -m lowprec verify` shows"):
        load_run(folder)


def test_a_flipped_bit_is_noticed(tmp_path):
    """Every byte of a recorded table: one changed bit raises or changes no number."""
    table = pd.DataFrame(dict(step=range(40), loss=np.random.default_rng(0).normal(size=40)))
    path = tmp_path / "a.parquet"
    write_table(path, table)
    content = path.read_bytes()
    for i in range(len(content)):
        path.write_bytes(content[:i] + bytes([content[i] ^ 1 << i % 8]) + content[i + 1 :])
        with contextlib.suppress(UserError):
            read = runs.read_table(path, ("step", "loss"))
            pd.testing.assert_frame_equal(read, table, check_exact=True)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def shorten(path):
    pd.read_parquet(path).iloc[:-1].to_parquet(path)


def test_empty_campaign(tmp_path):
    with pytest.raises(UserError, match="no run folders"):
        load_runs(tmp_path)
    with pytest.raises(UserError, match=r"did you mean rivals\?"):
        load_runs("rivels")
    (tmp_path / ".low-seed0.part").mkdir()
    with pytest.raises(UserError, match=r"only \.low-seed0\.part, unfinished"):
        load_runs(tmp_path)


def test_one_run_is_not_a_campaign_and_shows_itself_in_a_line(folder):
    with pytest.raises(UserError, match=r"low-seed1 is one run: take load_run"):
        load_runs(folder)
    assert repr(load_run(folder)).startswith("Run(low-seed1: LOW, seed 1, ")


def test_a_missing_run_says_where_and_if_it_is_unfinished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"no run folder 'mine' in '{tmp_path.name}'$"):
        load_run("mine")
    (tmp_path / ".mine.part").mkdir()
    with pytest.raises(UserError, match=r"; .mine.part there holds an unfinished one$"):
        load_run("mine")


def test_the_repository_matches_its_manifest():
    assert manifest.verify() >= 30


def test_manifest_names_what_differs(tmp_path):
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    manifest.write_manifest(tmp_path)
    assert manifest.verify(tmp_path) == 2
    (tmp_path / "a").write_text("3")
    (tmp_path / "b").unlink()
    (tmp_path / "c").write_text("4")
    with pytest.raises(UserError) as error:
        manifest.verify(tmp_path)
    for words in ("a differs", "b is missing", "c is not in the manifest", "verify --write"):
        assert words in str(error.value)
    for name in "de":
        (tmp_path / name).write_text("5")
    with pytest.raises(UserError, match="b is missing; c is not .*; d is not .* and 2 more; res"):
        manifest.verify(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="manifest.json"):
        manifest.verify(tmp_path)


def test_one_file_is_accepted_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "data_root", lambda: tmp_path)
    for text in "12":
        for name in "ab":
            (tmp_path / name).write_text(text)
        if text == "1":
            manifest.write_manifest()
    manifest.accept_file(tmp_path / "a")
    with pytest.raises(UserError, match="does not match its manifest: b differs; restore"):
        manifest.verify()


@pytest.mark.parametrize("target", ["a folder", "a file", "nothing"])
def test_a_link_is_named(tmp_path, target):
    root = tmp_path / "data"
    (root / "inside").mkdir(parents=True)
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a file").write_text("1")
    manifest.write_manifest(root)
    (root / "inside" / "link").symlink_to(tmp_path / target)
    for call in (manifest.verify, manifest.write_manifest):
        with pytest.raises(UserError, match="link is a link; put in its place"):
            call(root)


@pytest.mark.parametrize("text", ["[]", "[1]", "3", "null"])
def test_a_manifest_of_another_kind_is_named(tmp_path, text):
    (tmp_path / "a").write_text("1")
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match="manifest"):
        manifest.verify(tmp_path)


def test_the_commit_says_whether_the_code_had_changed(tmp_path, monkeypatch):
    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.check_output(["git", *who, *words], cwd=tmp_path, text=True).strip()

    code = tmp_path / "lowprec" / "records" / "provenance.py"
    code.parent.mkdir(parents=True)
    code.touch()
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "a")
    monkeypatch.delenv("LOWPREC_COMMIT", raising=False)
    monkeypatch.setattr(provenance, "__file__", str(code))
    (tmp_path / "README.md").write_text("other")
    assert provenance.git_commit() == git("rev-parse", "HEAD")
    code.write_text("changed")
    assert provenance.git_commit() == git("rev-parse", "HEAD") + "+changes"
    monkeypatch.setenv("LOWPREC_COMMIT", "abc")
    assert provenance.git_commit() == "abc"


def test_the_commit_is_that_of_this_code_and_of_no_repository_around_it(tmp_path, monkeypatch):
    code = tmp_path / ".venv" / "lowprec" / "records" / "provenance.py"
    code.parent.mkdir(parents=True)
    code.touch()
    (tmp_path / ".gitignore").write_text(".venv")
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.delenv("LOWPREC_COMMIT", raising=False)
    monkeypatch.setattr(provenance, "__file__", str(code))
    assert provenance.git_commit() == "unknown"


def recorded_paths():
    folders = (files.data_root() / "runs").iterdir()
    found = [path for folder in folders for path in runs.run_paths(folder)]
    assert len(found) >= 533
    return found


def test_each_runs_commit_has_its_predictions():
    """The campaign file that the run's commit holds asks for the run: its arm and its seed."""
    root = files.repo_root()

    def git(*words, **kwargs):
        return subprocess.run(["git", *words], cwd=root, capture_output=True, **kwargs).stdout

    if git("rev-parse", "--is-shallow-repository").strip() != b"false":
        pytest.skip("not a git clone with its history")
    recorded = {}
    for path in recorded_paths():
        info = runs.read_info(path)
        name = f"{info['commit']}:data/runs/{path.parent.name}/campaign.yaml"
        recorded.setdefault(name, []).append(info)
    rest = git("cat-file", "--batch", input="\n".join(recorded).encode())
    for name, infos in recorded.items():
        head, _, rest = rest.partition(b"\n")
        assert head.split()[1] == b"blob", f"there is no {name}"
        size = int(head.split()[2])
        content, rest = rest[:size], rest[size + 1 :]
        arms, digest = yaml.safe_load(content)["arms"], hashlib.sha256(content).hexdigest()
        for info in infos:
            where = f"{name} does not ask for {info['name']}"
            assert info["config"]["seed"] in arms[info["arm"]]["seeds"], where
            assert info.get("campaign_sha256", digest) == digest, f"{name} changed uncommitted"


VARIES = re.compile(
    r"""\.\.\. | \([^)]*\) | \[[^]]*\] | '[^']*' | [\w.]+=(?:\([^)]*\)|\S+) | (?<![\w`-])\d[\d.,]*
    | \S*/(?!claims|benchmarks)[\w.]+ | \b[A-Z]+\b | \b(?:python3|mine|pysource|low-seed0|int)\b
    | campaign\.yaml | some\.txt | lowprec-capture-1 | refuted | supported | a\ number
    | steps(?=;) | No\ space\ left.*?; | ;""",
    re.VERBOSE,
)
"""What differs from case to case in the messages that book/rerun.md quotes."""


def test_the_book_quotes_messages_that_there_are():
    """Every fragment, of two words and more, of each message in its table of troubles."""
    root = files.repo_root()
    said = [(root / "Makefile").read_text()]
    for name in (*registry.pages(root / "notebooks"), "_template"):
        cells = json.loads((root / "notebooks" / f"{name}.ipynb").read_text())["cells"]
        said += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for path in (*(root / "lowprec").rglob("*.py"), root / "tests" / "conftest.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "\n" for p in node.values)
                said.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.append(node.value)
    said = "\n".join(said)
    table = (root / "book" / "rerun.md").read_text().split("| message | mend |\n")[1]
    rows = [row[2:].split("` | ")[0] for row in table.split("\n\n")[0].splitlines()[1:]]
    messages = [m for row in rows for m in re.findall(r"`((?:[^`]|``)+)(?:`(?!`)|$)", row)]
    assert len(messages) > 40
    for message in messages:
        if message.startswith("[IPKernelApp]"):  # of another program
            continue
        parts = [part.strip(" ,:.") for part in VARIES.split(message.replace("``", "`"))]
        parts = [part for part in parts if len(part.split()) > 1]
        for part in parts:
            assert part in said, f"{message!r}: nothing says {part!r}; write ... for what varies"
        assert parts, f"{message!r} has nothing to look for"


def test_run_json_holds_no_absolute_path():
    for path in recorded_paths():
        info = runs.read_info(path)
        places = info["config"].pop("layers", {})
        assert all(re.fullmatch(r"\d+(/[\d,]+)?", place) for place in places), path
        assert "/" not in json.dumps(info).replace("n/a", ""), path
        assert info["hardware"]


def test_a_rise_of_just_half_a_nat_counts_and_one_back_at_just_a_quarter_does_not():
    assert find_explosion([1.0] * 100 + [1.5] * 700) == Explosion(149, True)
    assert find_explosion([1.0] * 100 + [1.75] * 60 + [1.25] * 700) is None


def test_of_a_run_that_goes_on_no_step_beyond_its_record_is_read(folder):
    info = json.loads((folder / "run.json").read_text()) | dict(ended="running", steps=1000)
    (folder / "run.json").write_text(json.dumps(info))
    run = load_run(folder)
    assert len(run.metrics) == 1000 and run.probes.step.max() < 1000


def test_the_final_loss_is_the_mean_of_the_last_500(folder):
    run = load_run(folder)
    assert run.final_loss == pytest.approx(run.metrics.loss.to_numpy()[-500:].mean(), rel=1e-6)
    run.metrics.loc[run.metrics.index[-1], "loss"] = math.nan
    assert math.isnan(run.final_loss)


def test_metrics_with_a_step_too_many_are_named(folder):
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(info | dict(steps=info["steps"] - 1)))
    with pytest.raises(UserError, match="steps of low-seed1 where its run.json says"):
        load_run(folder)


def test_a_run_of_just_one_probe_must_have_it(folder):
    info = json.loads((folder / "run.json").read_text())
    info["config"]["probe_every"] = info["steps"]
    (folder / "run.json").write_text(json.dumps(info))
    write_table(folder / "probes.parquet", load_run(folder).probes.iloc[:0])
    with pytest.raises(UserError, match="has no rows"):
        load_run(folder)


def test_a_summary_has_the_gradient_norm_of_the_end(folder):
    metrics = load_run(folder).metrics
    metrics.loc[metrics.index[-50:], "grad_norm"] = 1234.0
    write_table(folder / "metrics.parquet", metrics)
    assert "norm 1.23e+03, median of the last 50" in load_run(folder).summary()


def changed(folder, steps=None, config=(), **info):
    """The run in a folder, with another run.json and its first steps alone."""
    told = json.loads((folder / "run.json").read_text())
    told |= info | dict(steps=steps or told["steps"], config=told["config"] | dict(config))
    write_table(folder / "metrics.parquet", load_run(folder).metrics[: told["steps"]])
    (folder / "run.json").write_text(json.dumps(told))
    return load_run(folder)


def test_a_summary_says_what_is_unusual_of_a_model_and_how_fast_it_was(folder):
    assert ", norm" not in load_run(folder).summary()
    unusual = dict(positions="rotary", norm="layer", layers={"1": "FA2", "4/0,2": "LOW"})
    run = changed(folder, config=unusual, tokens_per_second=123_456, mfu=0.31)
    for words in (
        ": LOW, 1: FA2, 4/0,2: LOW\n",
        "wide, positions rotary; ",
        "123,456 tokens/s, 31% of",
    ):
        assert words in run.summary()
    assert run.layers == "1: FA2; 4/0,2: LOW"


def test_a_summary_of_a_short_run_counts_its_steps(folder):
    assert "over the last 20 steps" in changed(folder, steps=20).summary()


def test_each_gpu_is_named(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    assert provenance.provenance("cuda:1")["hardware"] == "GPU cuda:1"
