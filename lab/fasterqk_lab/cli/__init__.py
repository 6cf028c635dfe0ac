"""The command line of the lab: one module per command."""
