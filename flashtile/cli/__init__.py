"""The commands: a module each, which `flashtile_command` finds by its name."""
