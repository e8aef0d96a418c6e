"""Parts of the benchmark `resume_after_kill`: the run, its figures, the table, the plot."""
