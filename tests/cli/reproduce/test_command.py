"""What `fasterqk reproduce` refuses before any work is done."""

import pytest

from fasterqk.cli.main import main
from fasterqk.lab.experiments import fig4


def test_a_file_as_results_folder_is_refused_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fig4, "run", lambda arguments: pytest.fail("the work began"))
    taken = tmp_path / "taken"
    taken.write_text("mine")
    assert main(["reproduce", "fig4", "--out", str(taken)]) == 2
    assert capsys.readouterr().err == f"fasterqk reproduce: --out {str(taken)!r} is a file; name a folder\n"
