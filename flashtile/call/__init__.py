"""One call, from the caller's arguments to the backend that runs it.

`prepare` checks and describes it, `memo` finds the decision for an equal call, `dispatch` chooses
the backend, `checks` rejects what does not fit.
"""
