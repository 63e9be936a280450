"""Items and scorers, statistics, the bench runner, run folders and reports."""
