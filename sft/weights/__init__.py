"""Loads the weights of a run, selects those that it trains, and exports them."""
