"""What is written to the API server, and how often."""
