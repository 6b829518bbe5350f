"""Files that hold arguments: the custom configuration, roles, evaluation sets and the serving topology."""
