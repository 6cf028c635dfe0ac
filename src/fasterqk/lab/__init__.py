"""The lab: the paper's toy language, tasks, models, training, runs, experiments and pages."""
