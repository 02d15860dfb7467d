"""What is known of all runs, and what follows from it. Pure: no API, no clock, no network."""
