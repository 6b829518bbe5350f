"""The two errors that end a run with a message and without a traceback.

`UserError`: the person who started the run can mend it (a flag, a file, a plug-in); exit status 2.
`RunError`: something the run depends on failed (an engine, the router, a disk); exit status 1.
Both messages name what is wrong, the value that was met, and the way out.
"""


class UserError(ValueError):
    """Bad input: flag, file or plug-in. The process ends with exit status 2."""

    exit_status = 2


class RunError(RuntimeError):
    """A part of the run failed. The process ends with exit status 1."""

    exit_status = 1
