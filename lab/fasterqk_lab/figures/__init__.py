"""Figures and tables: one style, the charts that experiments share, and the documents that the page reads."""

from fasterqk_lab.figures._charts import STANDS_COLORS as STANDS_COLORS
from fasterqk_lab.figures._charts import Grid as Grid
from fasterqk_lab.figures._charts import Line as Line
from fasterqk_lab.figures._charts import Panel as Panel
from fasterqk_lab.figures._charts import Point as Point
from fasterqk_lab.figures._charts import draw_forest as draw_forest
from fasterqk_lab.figures._charts import effect_text as effect_text
from fasterqk_lab.figures._charts import lines_of as lines_of
from fasterqk_lab.figures._charts import save_curve as save_curve
from fasterqk_lab.figures._charts import save_dtaps as save_dtaps
from fasterqk_lab.figures._charts import save_forest as save_forest
from fasterqk_lab.figures._charts import save_grids as save_grids
from fasterqk_lab.figures._charts import save_panels as save_panels
from fasterqk_lab.figures._charts import save_scatter as save_scatter
from fasterqk_lab.figures._documents import COLORS as COLORS
from fasterqk_lab.figures._documents import INK as INK
from fasterqk_lab.figures._documents import PARAMETERIZATION_COLORS as PARAMETERIZATION_COLORS
from fasterqk_lab.figures._documents import effect_record as effect_record
from fasterqk_lab.figures._documents import effect_table as effect_table
from fasterqk_lab.figures._documents import plotting as plotting
from fasterqk_lab.figures._documents import save_document as save_document
from fasterqk_lab.figures._documents import save_examples as save_examples
from fasterqk_lab.figures._documents import save_figure as save_figure
from fasterqk_lab.figures._documents import save_table as save_table
from fasterqk_lab.figures._documents import svg_bytes as svg_bytes
from fasterqk_lab.figures._documents import wide_rows as wide_rows
