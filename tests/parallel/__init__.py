"""Tests with several processes."""
