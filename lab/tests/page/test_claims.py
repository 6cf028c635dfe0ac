"""Claims: a verdict is one of six, and what is saved comes back."""

import pytest

from fasterqk.errors import InputError
from fasterqk_lab.compare import VERDICTS
from fasterqk_lab.figures._documents import load_documents
from fasterqk_lab.page import Claim, count_verdicts, read_claims, save_claims


def test_claims_come_back_as_they_were_saved(tmp_path):
    claims = [
        Claim("sharper", "Table 1", "confirmed", "+0.26 ± 0.05, n = 5", "A remark.", "table-main", "depth"),
        Claim("never", "Section 6", "not run"),
    ]
    save_claims(tmp_path, claims, title="Claims")
    [document] = load_documents(tmp_path, "claims")
    assert read_claims(document) == claims


@pytest.mark.parametrize("verdict", ["", "holds", "Confirmed"])
def test_other_verdicts_are_refused(verdict):
    with pytest.raises(InputError, match="is not a verdict; choose from confirmed, depends on the setting"):
        Claim("c", "w", verdict)


def test_a_damaged_document_is_named():
    with pytest.raises(InputError, match="'paper' are damaged"):
        read_claims({"name": "paper", "claims": [{"claim": "c"}]})


def test_all_verdicts_are_counted():
    claims = [Claim("c", "w", verdict) for verdict in VERDICTS] * 2
    assert count_verdicts(claims).startswith("confirmed 2, depends on the setting 2, inconclusive 2")
