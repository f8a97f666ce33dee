"""What differs between two states, by name and by how much."""
