"""What the text of the user's script says: the line of a call, and the sizes that are written there."""
