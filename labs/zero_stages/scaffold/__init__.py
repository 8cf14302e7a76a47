"""What a student of notebook 03 subclasses and calls: an optimizer over shards, a module that calls
hooks around each unit, and saving and loading when no rank has everything."""
