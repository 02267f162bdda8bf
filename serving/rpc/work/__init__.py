"""Where the work of calls is done: models, galleries, threads."""
