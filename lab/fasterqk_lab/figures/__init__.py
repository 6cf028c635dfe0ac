"""Figures and tables: one style, the charts that experiments share, and the documents that the page reads."""

from fasterqk_lab.figures._charts import draw_forest as draw_forest
from fasterqk_lab.figures._charts import draw_grid as draw_grid
from fasterqk_lab.figures._charts import draw_intervals as draw_intervals
from fasterqk_lab.figures._charts import effect_rows as effect_rows
from fasterqk_lab.figures._charts import effect_text as effect_text
from fasterqk_lab.figures._charts import loss_axis as loss_axis
from fasterqk_lab.figures._charts import save_curve as save_curve
from fasterqk_lab.figures._charts import save_dtaps as save_dtaps
from fasterqk_lab.figures._charts import save_forest as save_forest
from fasterqk_lab.figures._documents import save_comparison as save_comparison
from fasterqk_lab.figures._documents import save_curves as save_curves
from fasterqk_lab.figures._documents import save_document as save_document
from fasterqk_lab.figures._documents import save_effects as save_effects
from fasterqk_lab.figures._documents import save_examples as save_examples
from fasterqk_lab.figures._documents import save_table as save_table
from fasterqk_lab.figures._style import COLORS as COLORS
from fasterqk_lab.figures._style import DTAP_COLOURS as DTAP_COLOURS
from fasterqk_lab.figures._style import HEATMAP as HEATMAP
from fasterqk_lab.figures._style import INK as INK
from fasterqk_lab.figures._style import PAPER as PAPER
from fasterqk_lab.figures._style import PARAMETERIZATION_COLORS as PARAMETERIZATION_COLORS
from fasterqk_lab.figures._style import draw_dtap as draw_dtap
from fasterqk_lab.figures._style import dtap_rows as dtap_rows
from fasterqk_lab.figures._style import plotting as plotting
from fasterqk_lab.figures._style import save_dtap as save_dtap
from fasterqk_lab.figures._style import save_figure as save_figure
