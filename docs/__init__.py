"""Documentation, and the programs that write its tables."""
