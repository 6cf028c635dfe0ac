"""The page of a results folder: everything that was measured, to look at."""

from fasterqk_lab.page._claims import Claim as Claim
from fasterqk_lab.page._claims import count_verdicts as count_verdicts
from fasterqk_lab.page._claims import read_claims as read_claims
from fasterqk_lab.page._claims import save_claims as save_claims
from fasterqk_lab.page._page import write_page as write_page
