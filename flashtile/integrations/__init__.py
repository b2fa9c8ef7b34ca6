"""Bridges to other libraries. Importing flashtile imports none of them; each acts on the user's own
call alone."""
