"""What several example programs share and none of them owns."""
