"""The ways in: a link, a wrapper, SkipUpdate, and what tells a person about them."""
