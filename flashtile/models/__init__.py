"""Language models made of `flashtile.modules`."""
