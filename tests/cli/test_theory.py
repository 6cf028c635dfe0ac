"""`fasterqk theory` on the command line."""

import csv
import io
import json

import pytest

from fasterqk.cli.main import main

STATE = ["mu_ov", "mu_qk", "alpha", "loss", "time", "effective_ratio"]


def printed_json(capsys, *words):
    assert main([*words, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


def test_solve_at_a_loss_and_at_the_time_it_gives(capsys):
    words = ["theory", "solve", "--M", "5", "--b", "50", "--m", "5", "--n", "50", "--qk-ratio", "10"]
    state = printed_json(capsys, *words, "--loss", "1e-4")
    assert list(state) == STATE
    assert state["alpha"] == pytest.approx(0.8807, abs=5e-5)
    assert state["time"] == pytest.approx(1.953e6, rel=5e-4)
    again = printed_json(capsys, *words, "--time", repr(state["time"]))
    assert again["alpha"] == pytest.approx(state["alpha"], rel=1e-12)


def test_every_option_of_solve_reaches_the_theory(capsys):
    words = ["theory", "solve", "--qk-ratio", "2", "--loss", "0.1"]
    plain = printed_json(capsys, *words)
    for option in (
        "--M 7",
        "--b 9",
        "--m 8",
        "--n 60",
        "--common 12",
        "--query fixed",
        "--parameterization facO",
        "--mu0 1",
        "--q0 0.5",
        "--optimizer sign",
    ):
        changed = printed_json(
            capsys, *["theory", "solve", "--qk-ratio", "2", "--loss", "0.1"], *option.split()
        )
        assert changed["mu_qk"] != plain["mu_qk"], option


def test_ratio_and_solve_invert_each_other(capsys):
    words = ["--M", "20", "--parameterization", "FAFO", "--loss", "1e-3"]
    found = printed_json(capsys, "theory", "ratio", "--alpha", "0.9", *words)
    assert list(found) == ["qk_ratio"]
    state = printed_json(capsys, "theory", "solve", "--qk-ratio", repr(found["qk_ratio"]), *words)
    assert state["alpha"] == pytest.approx(0.9, rel=1e-12)


def test_sign_descent_on_the_command_line(capsys):
    """The example of the theory's notes; a start below zero is this optimizer's own."""
    words = ["--optimizer", "sign", "--loss", "1e-3"]
    found = printed_json(capsys, "theory", "ratio", "--alpha", "0.9", *words)
    assert found["qk_ratio"] == pytest.approx(0.977, abs=5e-4)
    state = printed_json(capsys, "theory", "solve", "--qk-ratio", repr(found["qk_ratio"]), *words)
    assert state["alpha"] == pytest.approx(0.9, rel=1e-12)
    assert state["time"] == pytest.approx(state["mu_ov"] / 2, rel=1e-12)
    behind = printed_json(capsys, "theory", "solve", "--qk-ratio", "1", *words, "--mu0=-2")
    assert behind["mu_qk"] == pytest.approx((behind["mu_ov"] - 2) / 2, rel=1e-12)
    rows = printed_json(capsys, "theory", "table", "--optimizer", "sign", "--qk-ratio", "1")
    assert {row["optimizer"] for row in rows} == {"sign"}


def test_table_as_csv_json_and_text_holds_the_same_rows(capsys):
    words = [
        "theory",
        "table",
        "--qk-ratio",
        "0.1,1",
        "--loss",
        "0.1,1e-3",
        "--parameterization",
        "CACO,FAFO",
    ]
    assert main([*words, "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert list(rows[0]) == ["optimizer", "parameterization", "qk_ratio", *STATE]
    assert len(rows) == 8
    documents = printed_json(capsys, *words)
    assert [float(row["alpha"]) for row in rows] == [row["alpha"] for row in documents]
    assert main(words) == 0
    assert len(capsys.readouterr().out.splitlines()) == 9


@pytest.mark.parametrize(
    ("line", "quoted"),
    [
        ("solve --M 1 --qk-ratio 1 --loss .1", "1"),
        ("solve --b 2.5 --qk-ratio 1 --loss .1", "'2.5'"),
        ("solve --qk-ratio 0 --loss .1", "'0'"),
        ("solve --qk-ratio -3 --loss .1", "'-3'"),
        ("solve --qk-ratio nan --loss .1", "'nan'"),
        ("solve --qk-ratio inf --loss .1", "'inf'"),
        ("solve --qk-ratio 1e99 --loss .1", "1e+99"),
        ("solve --qk-ratio 1 --loss 1.7", "1.7"),
        ("solve --qk-ratio 1 --loss .1 --parameterization XAXO", "'XAXO'"),
        ("solve --qk-ratio 1 --loss .1 --parameterization FAFO --optimizer sign", "'FAFO'"),
        ("ratio --alpha .5 --loss .1 --parameterization FACO --optimizer sign", "'FACO'"),
        ("table --parameterization CACO,CAFO --optimizer sign", "'CAFO'"),
        ("solve --qk-ratio 1 --loss .1 --optimizer adam", "'adam'"),
        ("solve --qk-ratio 1 --loss .1 --mu0=-1", "mu0 = -1"),
        ("solve --qk-ratio 1 --loss .1 --query nobody", "'nobody'"),
        ("solve --qk-ratio 1 --loss .1 --mu0 -1", "-1"),
        ("solve --qk-ratio 1 --loss .1 --q0 nan", "nan"),
        ("solve --qk-ratio 1 --loss .1 --q0 much", "'much'"),
        ("solve --qk-ratio 1 --loss .1 --q0 0 --parameterization FACO", "q0 = 0"),
        ("solve --qk-ratio 1 --loss .1 --time 5", "--time"),
        ("solve --qk-ratio 1", "--loss"),
        ("ratio --alpha 0.05 --loss .1", "0.05"),
        ("ratio --alpha 1 --loss .1", "alpha = 1.0"),
        ("ratio --alpha 1.2 --loss .1", "1.2"),
        ("ratio --alpha 0.5 --loss 3", "3.0"),
        ("table --qk-ratio 1,0", "'0'"),
        ("table --loss 0.1,7", "7.0"),
        ("table --parameterization CACO,FAFA", "'FAFA'"),
        ("prove", "'prove'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, line, quoted):
    try:
        code = main(["theory", *line.split()])
    except SystemExit as stop:  # argparse leaves this way
        code = stop.code
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1 and quoted in printed.err
