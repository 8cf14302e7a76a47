"""Whether a machine will run the workbook, found out before it costs money: scripts/preflight."""
