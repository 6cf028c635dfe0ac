"""Tools of the repository for developers. No wheel holds them."""
