"""The other side of each ratio: what a careful user writes without this project."""
