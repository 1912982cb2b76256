"""Measurements side by side; see README.md beside this file."""
