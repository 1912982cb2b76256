"""Groups of processes for the tests of `parallel`, what they run, and the tables that take longer than a test."""
