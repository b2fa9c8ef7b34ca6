"""One call, from the caller's arguments to the backend that runs it.

`prepare` checks and describes the call, `checks` rejects invalid arguments, `dispatch` decides
which backend runs the call and how, and `memo` finds the decision for an equal earlier call.
"""
