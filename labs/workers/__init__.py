"""How code gets onto ranks: launch, devices, output, faults, and the watch for hangs."""
