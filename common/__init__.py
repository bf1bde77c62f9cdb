"""What every chapter of the course shares and none of them teaches."""
