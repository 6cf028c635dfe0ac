"""How a parameter gets its label: names, a registry of layouts, the user's rules and the autograd probe."""
