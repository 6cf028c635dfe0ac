"""Tasks: token ids with a class or an answer and, where known, the tokens that decide it."""

from fasterqk_lab.tasks._registry import TASKS as TASKS
from fasterqk_lab.tasks._registry import AnswerTask as AnswerTask
from fasterqk_lab.tasks._registry import ClassificationTask as ClassificationTask
from fasterqk_lab.tasks._registry import LabelledInstance as LabelledInstance
from fasterqk_lab.tasks._registry import LabelledInstances as LabelledInstances
from fasterqk_lab.tasks._registry import Questions as Questions
from fasterqk_lab.tasks._registry import Task as Task
from fasterqk_lab.tasks._registry import check_data as check_data
from fasterqk_lab.tasks._registry import check_task as check_task
from fasterqk_lab.tasks._registry import checksum as checksum
from fasterqk_lab.tasks._registry import data_folder as data_folder
from fasterqk_lab.tasks._registry import data_source as data_source
from fasterqk_lab.tasks._registry import left_out as left_out
from fasterqk_lab.tasks._registry import load_task as load_task
from fasterqk_lab.tasks._registry import task_module as task_module
from fasterqk_lab.tasks._registry import use_data_folder as use_data_folder
from fasterqk_lab.tasks._registry import wrong_checksums as wrong_checksums
