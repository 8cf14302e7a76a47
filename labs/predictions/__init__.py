"""What should happen: closed forms with their sources; starts no process."""
