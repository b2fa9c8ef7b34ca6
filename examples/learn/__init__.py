"""The code of the lessons in docs/learn: small, complete and tested."""
