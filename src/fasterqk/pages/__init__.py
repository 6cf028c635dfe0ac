"""Self-contained pages to open in a browser, among them the explorer of the theory."""

from fasterqk.pages._page import CHART_SCRIPTS as CHART_SCRIPTS
from fasterqk.pages._page import json_text as json_text
from fasterqk.pages._page import page_html as page_html
from fasterqk.pages._page import write_explorer as write_explorer
