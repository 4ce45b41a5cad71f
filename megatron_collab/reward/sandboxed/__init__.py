"""What runs in the sandbox, with the standard library alone: `launcher` is where it starts.

Candidate and tests are two processes. `tester` decides: it runs the tests, and reaches the candidate's functions by
calls over a pipe (`wire`), whose arguments and results are data of a fixed schema (`values`, `frames`) or handles.
"""
