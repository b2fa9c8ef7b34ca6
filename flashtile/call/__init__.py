"""One call, from the caller's arguments to the backend that runs it.

`prepare` checks and describes the call, `memo` finds the decision for an equal earlier call,
`dispatch` chooses the backend, and `checks` rejects invalid arguments.
"""
