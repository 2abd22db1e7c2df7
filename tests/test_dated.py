"""Dated tables: recorded with their parameters, read by the page that has them, compared."""

import json

import pandas as pd
import pytest

from lowprec import UserError
from lowprec.publish.notebook import declared_parameters
from lowprec.records import files
from lowprec.studies import curvature, dated, probing, rivals


def measured(size):
    return {"one": pd.DataFrame(dict(x=[1.0 * size])), "two": pd.DataFrame(dict(y=["a", "b"]))}


def unasked(**parameters):
    raise AssertionError("measured although it is recorded")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "data_root", lambda: tmp_path)
    return tmp_path / "studies" / "some"


def rename(folder, old, new):
    for path in folder.glob(f"{old}-*"):
        path.rename(path.with_name(path.name.replace(old, new)))


def test_a_page_reads_the_newest_tables_with_its_parameters_and_else_measures(folder):
    assert dated.tables("some", measured, size=3)["one"].x.item() == 3
    paths = dated.record(folder, measured, size=2)
    date = dated.recorded("some", size=2)["one"].attrs["date"]
    assert [path.name for path in paths] == [f"{date}-one.parquet", f"{date}-two.parquet"]
    rename(folder, date, "2026-01-02")
    dated.record(folder, lambda size: {"one": measured(5)["one"]}, size=2)
    rename(folder, date, "2026-01-01")
    found = dated.tables("some", unasked, size=2)
    assert found["one"].x.item() == 2 and list(found["two"].y) == ["a", "b"]
    about = found["one"].attrs
    assert about["parameters"] == {"size": 2} and {"hardware", "versions", "commit"} <= set(about)
    assert dated.tables("some", measured, size=4)["one"].x.item() == 4


def test_what_is_measured_now_is_said_before(folder, capsys, caplog):
    def asked(size):
        assert "some(size=2)" in capsys.readouterr().out and "takes a minute" in caplog.text
        return measured(size)

    dated.tables("some", asked, size=2)
    dated.record(folder, measured, size=2)
    dated.tables("some", unasked, size=2)
    assert capsys.readouterr().out == ""


def test_tables_of_today_are_not_overwritten_nor_measured_in_vain(folder):
    dated.record(folder, measured, size=2)
    with pytest.raises(UserError, match="one.parquet exists and is never overwritten"):
        dated.record(folder, unasked, size=2)


def test_numbers_made_again_are_those_of_the_table_or_an_error_names_the_first(folder):
    table = measured(2)["one"]
    assert dated.agreement(table, [2.0], [2.0], within=0) == "", "it was measured just now"
    dated.record(folder, measured, size=2)
    table = dated.recorded("some", size=2)["one"]
    assert "2 numbers were made again for this page and are the same" in dated.agreement(
        table, [2.0, 3.0], [2.0, 3.0], within=0.01
    )
    assert "differ by 0.005" in dated.agreement(table, [2.01], [2.0], within=0.01)
    with pytest.raises(UserError, match="is 3 and comes out as 3.1 here"):
        dated.agreement(table, [2.0, 3.1], [2.0, 3.0], within=0.01)
    with pytest.raises(UserError, match="comes out as nan"):
        dated.agreement(table, [float("nan")], [2.0], within=0.01)


@pytest.mark.parametrize(
    ("study", "page", "parameters"),
    [
        ("curvature", "the_gradient_knows_the_rounding", curvature.PARAMETERS),
        ("rivals", "laboratory/rivals", rivals.PARAMETERS),
    ],
)
def test_the_book_has_the_tables_with_the_parameters_of_the_page(study, page, parameters):
    cells = json.loads((files.repo_root() / f"notebooks/{page}.ipynb").read_text())["cells"]
    source = next("".join(c["source"]) for c in cells if c["id"] == "parameters")
    values: dict = {}
    exec(source, values)
    given = {name: values[name] for name in declared_parameters(source)}
    assert {name: given[name] for name in parameters} == parameters
    assert dated.recorded(study, **parameters)
    for path in (files.data_root() / "studies" / study).glob("*"):
        assert path.stat().st_size < 200e3


def test_the_time_of_the_probe_is_recorded_and_its_small_model_comes_out_again():
    pytest.importorskip("transformers")
    table = dated.recorded("probing", **probing.PARAMETERS)["seconds"]
    assert table.model.tolist() == list(probing.MODELS) and (table.tokens == 512).all()
    then = table.iloc[0]
    again = probing.seconds("small", 64).iloc[0]
    assert (again.model, again.weights, again.tokens) == (then.model, then.weights, 64)
    assert 0 < again.seconds < 60
    assert table.seconds[1] > table.seconds[0]
