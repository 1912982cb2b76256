"""Tests with several processes; what the processes run is in `rigs.parallel`."""
