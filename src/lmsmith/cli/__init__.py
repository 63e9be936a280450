"""The command line: thin commands over the library, found by import path so that help is instant.

Results go to standard output, everything else to standard error. Exit codes: 0 done; 1 a declared
bar was missed or the work failed; 2 wrong usage; 3 something missing; 130 stopped.
"""
