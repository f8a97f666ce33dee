"""Random draws: every rank gets its part of what the serial script draws."""
