"""The page of a results folder: everything that was measured, to look at."""

from fasterqk_lab.page._page import chapter_of as chapter_of
from fasterqk_lab.page._page import count_verdicts as count_verdicts
from fasterqk_lab.page._page import write_page as write_page
