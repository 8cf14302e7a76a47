"""What every lab trains: models, data, and the plain training loop."""
