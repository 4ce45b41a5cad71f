"""The code that runs in the sandbox, standard library only; `launcher` is the entry point.

Candidate and tests are two processes. `tester` decides: it runs the tests and reaches the candidate's functions by
calls over a pipe (`wire`). Arguments and results are data of a fixed schema (`values`, `frames`) or handles.
"""
