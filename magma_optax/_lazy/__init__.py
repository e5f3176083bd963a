"""Directions that are computed for surviving blocks alone."""
