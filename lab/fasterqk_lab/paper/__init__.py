"""What the published results say: the paper's claims, the open questions, and the pages of docs/results."""

from fasterqk_lab.paper._claims import FOLDER as FOLDER
from fasterqk_lab.paper._claims import Claim as Claim
from fasterqk_lab.paper._claims import Line as Line
from fasterqk_lab.paper._claims import Published as Published
from fasterqk_lab.paper._claims import Question as Question
from fasterqk_lab.paper._claims import read_claims as read_claims
from fasterqk_lab.paper._claims import read_lines as read_lines
from fasterqk_lab.paper._claims import read_questions as read_questions
from fasterqk_lab.paper._pages import claims_page as claims_page
from fasterqk_lab.paper._pages import experiment_page as experiment_page
from fasterqk_lab.paper._pages import index_page as index_page
from fasterqk_lab.paper._pages import questions_page as questions_page
from fasterqk_lab.paper._pages import ratio_table as ratio_table
from fasterqk_lab.paper._pages import save_picture as save_picture
