"""Tidegate inside other programs, each in a package of its own."""
