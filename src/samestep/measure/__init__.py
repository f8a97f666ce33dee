"""Reads what runs wrote, and says what differs and where the time went."""
