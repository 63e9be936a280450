"""The command line: thin commands over the library.

A command is a plain function: its signature is its options and its docstring their help, read by
cyclopts only when there is something to parse, so that `lmsmith --help` and `lmsmith list` are
instant.

Results go to standard output, everything else to standard error. Exit codes: 0 done; 1 a declared
bar was missed or the work failed; 2 wrong usage; 3 something missing; 130 stopped.
"""
