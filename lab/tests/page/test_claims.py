"""Claims: a verdict is one of four, effects have signs, and what is saved comes back."""

import math

import pytest

from fasterqk.attention import Interval
from fasterqk.errors import InputError
from fasterqk_lab.figures._documents import load_documents
from fasterqk_lab.page import VERDICTS, Claim, save_claims
from fasterqk_lab.page._claims import count_verdicts, read_claims, signed_text


def test_claims_come_back_as_they_were_saved(tmp_path):
    claims = [
        Claim("sharper", "Table 1", "holds", "e", effect=Interval(0.26, 0.05, 5), null=0.4, seeds=5),
        Claim("one seed", "Table 2", "holds in part", "e", effect=Interval(0.26, math.nan, 1), unit="points"),
        Claim("never", "Section 6", "not tested", "Needs a machine with a GPU."),
    ]
    save_claims(tmp_path, claims, title="Claims")
    [document] = load_documents(tmp_path, "claims")
    found = read_claims(document)
    assert [claim.effect_text for claim in found] == ["+0.26 ± 0.05", "+0.26 points", ""]
    assert found[0].null == 0.4
    assert [claim.verdict for claim in found] == [claim.verdict for claim in claims]


@pytest.mark.parametrize("verdict", ["", "true", "Holds"])
def test_other_verdicts_are_refused(verdict):
    with pytest.raises(InputError, match="is no verdict; choose from holds, holds in part"):
        Claim("c", "w", verdict, "e")


def test_a_claim_without_evidence_is_refused():
    with pytest.raises(InputError, match="evidence"):
        Claim("c", "w", "holds", "")


def test_a_damaged_document_is_named():
    with pytest.raises(InputError, match="'paper' are damaged"):
        read_claims({"name": "paper", "claims": [{"claim": "c"}]})


def test_what_rounds_to_zero_has_no_sign():
    assert signed_text(0.001) == "0.00"
    assert signed_text(-0.001) == "0.00"
    assert signed_text(None) == "–"


def test_all_verdicts_are_counted():
    claims = [Claim("c", "w", verdict, "e") for verdict in VERDICTS] * 2
    assert count_verdicts(claims) == "2 hold, 2 hold in part, 2 do not hold, 2 were not tested"
