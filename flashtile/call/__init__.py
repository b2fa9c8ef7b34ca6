"""One call, from the caller's arguments to the backend that runs it.

`prepare` checks and describes the call, `checks` rejects invalid arguments, `decide` says how the
call runs and `dispatch` by which backend, and `memo` finds the decision for an equal earlier call.
"""
